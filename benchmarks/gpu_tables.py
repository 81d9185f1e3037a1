"""Print the tables of the GPU benchmark: cells by context length, with notes."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from benchmarks.gpu_cells import MEASURED
from benchmarks.harness import Column, Row, Table, extent, middle


def _unmeasured(row: Row) -> str | None:
    if row["status"] == MEASURED:
        return None
    return f"{row['policy']:<14}{row['context']:>7}  {row['status']}: {row['note']}"[:80]


def _mean_token(row: Row) -> float | None:
    return fmean(row["decode_ms"]) if row["decode_ms"] else None


def _found(key: str) -> Callable[[Row], Any]:
    return lambda row: row["found"].get(key)


def _token(row: Row) -> float | None:
    return middle("decode_ms")(row) if row["decode_ms"] else None


def _peak(row: Row) -> float | None:
    peaks = [row["prefill_peak_bytes"], row["decode_peak_bytes"]]
    return None if None in peaks else max(peaks) / 2**30


class CellTable(Table):
    """A table sorted by context, followed by the notes of measured cells."""

    def text(self, record: dict[str, Any]) -> str:
        """Return the table as text; empty if there are no compiled cells. See `Table.text`."""
        rows = sorted(record.get(self.part, []), key=lambda row: int(row["context"]))
        if self.gap and not rows:
            return ""
        notes = [
            f"{row['policy']}, {row['context']} tokens: {row['note']}"[:80]
            for row in rows
            if row["status"] == MEASURED and row["note"]
        ]
        return "\n".join([self.header, *map(self.line, rows), *notes])


CELLS = CellTable(
    "cells",
    Column("policy", -14, "policy"),
    Column("tokens", 7, "context"),
    Column("prefill s", 10, middle("prefill_ms", 1e3), ".3f"),
    Column("x", 6, "prefill_speedup", ".2f"),
    Column("allowed", 8, "prefill_allowed", ".2f"),
    Column("decode ms", 10, _token, ".2f"),
    Column("x", 6, "decode_speedup", ".2f"),
    Column("peak GiB", 9, _peak, ".1f"),
    Column("scoring", 8, "scoring_share", ".1%"),
    instead=_unmeasured,
)
COMPILED_CELLS = CellTable(
    "compiled",
    Column("compiled", -14, "policy"),
    Column("tokens", 7, "context"),
    Column("compile s", 10, lambda row: row["compile_ms"] / 1e3, ".1f"),
    Column("prefill s", 10, lambda row: row["prefill_ms"] / 1e3, ".3f"),
    Column("decode ms", 10, middle("compiled_decode_ms"), ".2f"),
    Column("x static", 9, "speedup_to_static", ".2f"),
    Column("allowed", 8, "decode_allowed", ".2f"),
    Column("x loop", 8, "speedup_to_uncompiled", ".2f"),
    instead=_unmeasured,
    gap=True,
)
ANSWER_CELLS = CellTable(
    "answers",
    Column("generate", -14, "policy"),
    Column("tokens", 7, "context"),
    Column("buffers", 9, "buffers"),
    Column("rows", 5, "batch"),
    Column("prefill s", 10, lambda row: row["prefill_ms"] / 1e3, ".3f"),
    Column("x", 6, "prefill_speedup", ".2f"),
    Column("decode ms", 10, _token, ".2f"),
    Column("x", 6, "decode_speedup", ".2f"),
    Column("mean", 7, _mean_token, ".2f"),
    Column("x", 6, "mean_speedup", ".2f"),
    instead=_unmeasured,
    gap=True,
)
PACKED_CELLS = CellTable(
    "packed",
    Column("unequal heads", -14, "policy"),
    Column("tokens", 7, "context"),
    Column("held", 8, _found("held"), ".1%"),
    Column("padded", 8, _found("padded"), ".1%"),
    Column("padded ms", 10, lambda row: middle("padded_ms")(row["found"]), ".2f"),
    Column("packed ms", 10, lambda row: middle("packed_ms")(row["found"]), ".2f"),
    Column("of padded", 18, lambda row: extent("of_padded")(row["found"])),
    instead=_unmeasured,
    gap=True,
)
TEST_CELLS = CellTable(
    "tests",
    Column("tests", -32, "policy"),
    *(Column(each, 9, _found(each)) for each in ("passed", "failed", "skipped")),
    instead=_unmeasured,
    gap=True,
)
NOTES = """
x: the time of full context over the policy's, with the same buffers and rows:
above 1 a policy is faster. allowed: the most that operations, or bytes, allow.
x static, x loop: full context compiled, and in the loop, over the policy's."""
