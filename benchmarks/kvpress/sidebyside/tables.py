"""Print the record as tables, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from sidebyside.summary import ratio_to_full

Row = Mapping[str, Any]
MEGABYTE = 1e6


def ranged(values: Sequence[float]) -> str:
    """Return median and range as a text of at most 17 characters.

    Example:
        >>> ranged([1.0, 1.25, 3.0])
        '1.25 (1.00-3.00)'
    """
    digits = sum(max(values) < limit for limit in (10, 100))
    middle, lowest, highest = (
        f"{each:.{digits}f}" for each in (median(values), min(values), max(values))
    )
    return f"{middle} ({lowest}-{highest})"


def times_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table of prefill and decode times and of memory."""
    yield "Medians (lowest-highest) of wall and CPU time; decode in ms a token; peak in MB;"
    yield "x full: the prefill's CPU time over that of the same library's full cache"
    yield (
        f"{'method':<14}{'by':<9}{'tokens':>6} {'prefill s':>17}{'CPU s':>6}"
        f"{'x full':>7}{'decode':>8}{'CPU':>6}{'peak':>6}"
    )
    for row in rows:
        ratio, _, _ = ratio_to_full(rows, row, "prefill_cpu_s")
        yield (
            f"{row['method']:<14}{row['library']:<9}{row['context']:>6} "
            f"{ranged(row['prefill_s']):>17}{median(row['prefill_cpu_s']):>6.2f}{ratio:>7.2f}"
            f"{median(row['decode_s']) * 1e3:>8.1f}{median(row['decode_cpu_s']) * 1e3:>6.1f}"
            f"{median(row['peak_bytes']) / MEGABYTE:>6.0f}"
        )


def kept_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table of agreement between kept positions."""
    yield "Kept positions: tokens per layer and head, agreement (lowest head)"
    yield (
        f"{'method':<19}{'model':<7}{'tokens':>6}{'kvpolicy':>10}{'kvpress':>9}"
        f"{'agree':>14}{'by its rule':>14}"
    )
    for row in rows:
        yield (
            f"{row['method']:<19}{row['model']:<7}{row['context']:>6}"
            f"{_counts(row['kvpolicy']):>10}{_counts(row['kvpress']):>9}"
            f"{_agreement(row['agreements']):>14}{_agreement(row['agreements_by_rule']):>14}"
        )


def _counts(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else f"{max(counts)}-{min(counts)}"


def _agreement(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f} ({min(values):.3f})"


def answers_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table of exact answers of the needle model."""
    yield "Needle questions answered, per cent, one hop / two hops"
    yield f"{'method':<14}{'rate':>6}{'kvpolicy':>12}{'kvpress':>12}"
    for row in rows:
        shares = (
            " / ".join(f"{share:.0%}".rstrip("%") for share in row[library])
            for library in ("kvpolicy", "kvpress")
        )
        ours, theirs = shares
        yield f"{row['method']:<14}{row['rate']:>6.2f}{ours:>12}{theirs:>12}"


def batch_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table of padded rows."""
    yield "A left-padded row in a batch: tokens kept alone, in the batch, of these padding"
    yield "and common; in the second step: slots seen in layer 0, logits against the row"
    yield "alone and against dense attention to what was kept of the row"
    yield (
        f"{'method':<14}{'by':<9}{'alone':>6}{'in batch':>9}{'padding':>8}{'common':>7}{'seen':>6}"
        f"{'alone':>9}{'kept':>9}"
    )
    for row in rows:
        yield (
            f"{row['method']:<14}{row['library']:<9}{row['kept_alone']:>6}{row['kept']:>9}"
            f"{row['kept_padding']:>8}{row['kept_in_both']:>7}"
            f"{'all' if row['visible'] is None else row['visible']:>6}"
            f"{row['second_step_difference']:>9.1e}{row['difference_from_kept']:>9.1e}"
        )


def turns_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table of the second conversation turn."""
    yield "A second turn: tokens new and computed, first position, slots held by a head,"
    yield "logits against dense attention to what the first turn kept and what is newer"
    yield (
        f"{'method':<14}{'by':<9}{'way':<9}{'new':>4}{'computed':>9}{'from':>6}{'held':>10}"
        f"{'logits':>9}"
    )
    for row in rows:
        start = f"{row['method']:<14}{row['library']:<9}{row['way']:<9}"
        if "error" in row:
            yield (start + " " + row["error"])[:80]
            continue
        yield (
            f"{start}{row['new_tokens']:>4}{row['computed']:>9}{row['first_position']:>6}"
            f"{_counts(row['held']):>10}{row['difference_from_kept']:>9.1e}"
        )


TABLES = {
    "times": times_table,
    "kept": kept_table,
    "answers": answers_table,
    "batch": batch_table,
    "turns": turns_table,
}


def show(record: Mapping[str, Any]) -> str:
    """Return all tables of a record as text."""
    return "\n\n".join("\n".join(table(record[name])) for name, table in TABLES.items())
