"""Run `kvpolicy estimate --memory`: how many sessions fit beside the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from rich.table import Table

from kvpolicy.evaluation.commands.memory_options import MemoryAsked
from kvpolicy.evaluation.comparison.chosen import decoding_rule
from kvpolicy.evaluation.comparison.tables import byte_unit
from kvpolicy.evaluation.comparison.variant import Variant
from kvpolicy.evaluation.cost.activations import ModelMemory
from kvpolicy.evaluation.cost.estimate import Estimate
from kvpolicy.evaluation.cost.model_shape import ModelShape
from kvpolicy.evaluation.cost.released import Weights
from kvpolicy.evaluation.cost.session import Session, session_of
from kvpolicy.evaluation.options import PolicyOptions
from kvpolicy.evaluation.progress import Progress
from kvpolicy.policies import PassAllPropagation
from kvpolicy.policies.selectors.wrapping import WrappingSelector


@attrs.frozen
class MemoryRow:
    """The memory that one prompt and its answer take under one policy, as a row of the table.

    Args:
        variant: The policy, its bound while an answer is decoded among its parameters.
        chunk: Tokens of a forward of the prompt; None where it is read whole.
        bound: Tokens that layers keep while the answer is decoded; None for all.
        session: What a session holds.
    """

    variant: Variant
    chunk: int | None
    bound: int | None
    session: Session


@attrs.frozen
class MemoryFound:
    """A memory estimate: what was assumed, and the session memory of each policy.

    Args:
        asked: What was asked.
        weights: Those of the model.
        attention: How it attends.
        dtype: Of what is not quantised.
        rows: See `MemoryRow`.
    """

    asked: MemoryAsked
    weights: Weights
    attention: str
    dtype: str
    rows: tuple[MemoryRow, ...]

    def as_data(self) -> dict[str, Any]:
        """Return the memory estimate as a dict for JSON."""
        return {
            **attrs.asdict(self.asked),
            "weights": self.weights.bytes,
            "quantised_by": self.weights.method,
            "attention": self.attention,
            "rows": [self._row(each) for each in self.rows],
        }

    def _row(self, row: MemoryRow) -> dict[str, Any]:
        session = row.session
        found: dict[str, Any] = {
            "policy": row.variant.name,
            "retention_rate": row.variant.retention_rate,
            "retention_tokens": row.variant.retention_tokens,
            "prefill_chunk_size": row.chunk,
            "decoding_tokens": row.bound,
        }
        numbers = {f"{name}_bytes": size for name, size in attrs.asdict(session).items()}
        peak = {"peak_bytes": session.peak, "peak_when": session.peak_when}
        fit = session.count_in(self.asked.memory, self.weights.bytes)
        return {**found, "session": {**numbers, **peak}, "sessions": fit}


def find_memory(
    asked: MemoryAsked,
    options: PolicyOptions,
    model: ModelMemory,
    shape: ModelShape,
    chosen: Sequence[Variant],
    found: Sequence[Estimate],
    progress: Progress,
) -> MemoryFound:
    """Compute the bytes a prompt and answer take under each policy, read whole or in chunks.

    Raises:
        UnsupportedModelError: The model cannot be run without numbers.
    """
    rows = []
    for index, (variant, cost) in enumerate(zip(chosen, found, strict=True)):
        progress(f"memory of {variant.label}", index, len(chosen))
        for chunk in (None, asked.chunk):
            for each, bound in _answering(variant, cost, options):
                session = session_of(
                    each.policy, shape, model, cost.context_len, asked.answer, chunk=chunk
                )
                rows.append(MemoryRow(each, chunk, bound, session))
    dtype = str(model.dtype).removeprefix("torch.")
    return MemoryFound(asked, weights_of(asked, model), model.attention, dtype, tuple(rows))


def weights_of(asked: MemoryAsked, model: ModelMemory) -> Weights:
    """Return the weights' bytes that were given, or those of the model as it was released.

    Raises:
        ValueError: None were given, and the model's configuration does not say what they take.
    """
    return model.weights if asked.weights is None else Weights(asked.weights)


def _answering(
    variant: Variant, cost: Estimate, options: PolicyOptions
) -> list[tuple[Variant, int | None]]:
    """Return a policy as it is, and a second variant that also evicts while decoding if it can."""
    tokens = options.decoding_tokens or max(_kept(variant, cost), 1)
    rule = decoding_rule(variant.policy, tokens, options.decoding_every)
    if rule is None:
        return [(variant, None)]
    policy = attrs.evolve(variant.policy, decoding=rule)
    return [(variant, None), (attrs.evolve(variant, policy=policy), tokens)]


def _kept(variant: Variant, cost: Estimate) -> int:
    """Return how many prompt tokens a policy keeps in a layer, the mean if layers differ."""
    selector = variant.policy.selector
    while isinstance(selector, WrappingSelector):
        selector = selector.selector
    rate = getattr(selector, "retention_rate", None)
    return round(cost.mean_kept) if rate is None else int(rate * cost.context_len)


def memory_table(found: MemoryFound) -> Table:
    """Return a table of the memory that a prompt and its answer take, several rows per policy."""
    # Chosen by the bytes held, since a peak with whole attention scores would show others as 0.00.
    unit, unit_bytes = byte_unit(max(each.session.held for each in found.rows))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("policy", overflow="fold")
    for header in (
        "rate",
        "read",
        "answer\nholds",
        f"read\n{unit}",
        f"held\n{unit}",
        f"peak\n{unit}",
        "peak\nwhile",
        "\nfit",
    ):
        left = header in ("read", "peak\nwhile")
        table.add_column(header, justify="left" if left else "right", no_wrap=True)

    def size(count: int) -> str:
        return f"{count / unit_bytes:.{0 if unit_bytes == 1 else 2}f}"

    label = None
    for row in found.rows:
        rate, tokens = row.variant.retention_rate, row.variant.retention_tokens
        shown = f"{rate:g}" if rate is not None else "-" if tokens is None else f"{tokens:,}"
        again, label = row.variant.label == label, row.variant.label
        cells = ["", ""] if again else [row.variant.name, shown]
        cells += ["whole" if row.chunk is None else "chunks"]
        cells += ["all" if row.bound is None else f"{row.bound:,}"]
        session = row.session
        fit = session.count_in(found.asked.memory, found.weights.bytes)
        sizes_of = map(size, (session.kept, session.held, session.peak))
        cells += [*sizes_of, session.peak_when, f"{fit:,}"]
        table.add_row(*cells)
    return table


def memory_headline(found: MemoryFound) -> str:
    """Return a line with the memory, weights, attention and answer length of the estimate."""
    asked = found.asked
    return (
        f"memory {_text(asked.memory)}, weights {_text(found.weights.bytes)}, attention "
        f"{found.attention}, answers of {asked.answer:,} tokens"
    )


def memory_notes(found: MemoryFound) -> list[str]:
    """Return notes on what the memory table's columns mean and on what is assumed."""
    asked = found.asked
    notes = [
        f"read: the prompt whole, or in chunks of {asked.chunk:,} tokens (prefill_chunk_size).",
        "answer holds: all tokens of the answer, or at most this many in each layer and",
        "those since the last eviction (decoding).",
        "read, held, peak: bytes of a session after the prompt, at the answer's end",
        "(buffers grow ahead of time: max_new_tokens), and at its maximum.",
        "fit: sessions that fit beside the weights, if one computes at a time:",
        "weights + (n - 1) x held + peak <= memory. Memory of the driver, and",
        "memory that the allocator cannot use, are not counted.",
        "In chunks, layers that see the whole prompt hold all of it until its end, under",
        "every policy: chunks save memory of activations, not of keys.",
    ]
    weights = found.weights
    if weights.method is not None:
        bits = 8 * weights.quantised_bytes / weights.quantised
        notes.append(
            f"weights: {100 * weights.quantised / weights.parameters:.1f}% of the parameters in "
            f"{weights.method}, {bits:.2f} bits each with their scales, as the configuration "
            f"says; the others in {found.dtype}. Copies that are unpacked to compute with are not "
            "counted."
        )
    staged = dict.fromkeys(
        each.variant.name
        for each in found.rows
        if each.variant.policy.propagation != PassAllPropagation()
    )
    if staged:
        notes.append(
            "In chunks, layers after a drop read and hold only the tokens that are left: "
            f"{', '.join(staged)}."
        )
    return notes


def memory_warnings(found: MemoryFound) -> list[str]:
    """Return a warning if the weights alone exceed the memory, else nothing."""
    if found.weights.bytes <= found.asked.memory:
        return []
    return [
        f"The weights alone, {_text(found.weights.bytes)}, exceed {_text(found.asked.memory)}, so "
        "that no session fits."
    ]


def _text(size: int) -> str:
    unit, unit_bytes = byte_unit(size)
    return f"{size / unit_bytes:.4g} {unit}"
