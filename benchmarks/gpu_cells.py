"""The cells of the GPU benchmark (one policy at one context), with their settings and order."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import attrs

from kvpolicy import CachePolicy

FULL = "full_context"
MEASURED, SKIPPED, FAILED = "measured", "skipped", "failed"
OUT_OF_MEMORY, OUT_OF_TIME = "out of memory", "out of time"
# Of the tests, where there is no pytest.
ABSENT = "absent"


@attrs.frozen
class Cell:
    """The measurements of one policy at one context length; None or empty if not measured.

    Args:
        policy: Name of the policy.
        context: Tokens of the prompt.
        status: ``measured``, ``out of memory``, ``out of time``, ``skipped`` or ``failed``.
        note: Why it was not measured, or what is missing from a measured one.
        rehearsal_ms: Prefill of the run before the counted ones.
        prefill_ms: Wall time of the prefill of every counted run.
        prefill_device_ms: The same between CUDA events.
        decode_ms: Wall time of every token after the first.
        decode_device_ms: The same between CUDA events.
        scoring_ms: Time inside the policy's decisions, in a separate prefill.
        scoring_prefill_ms: Time of that whole prefill.
        held_bytes: Keys and values after prefill.
        before_bytes: Allocated on the GPU before the prompt: the weights.
        prefill_peak_bytes: The most allocated during prefill.
        decode_peak_bytes: The most allocated while decoding.
        masked_layers_prefill: Layers whose attention got a mask in prefill.
        masked_layers_decode: The same while tokens were decoded, summed over all tokens.
        prefill_allowed: Full context over the policy by the count of operations.
        decode_allowed: Full context over the policy by the bytes that a decoded token reads.
        prefill_speedup: Median prefill of full context over this one's.
        decode_speedup: Median token of full context over this one's.
        generate_ms: Median prefill, and the tokens after it.
        generate_speedup: That of full context over this one's, where both decoded as many tokens.
        scoring_share: ``scoring_ms`` over ``scoring_prefill_ms``.
    """

    policy: str
    context: int
    status: str
    note: str = ""
    rehearsal_ms: float | None = None
    prefill_ms: tuple[float, ...] = ()
    prefill_device_ms: tuple[float, ...] = ()
    decode_ms: tuple[float, ...] = ()
    decode_device_ms: tuple[float, ...] = ()
    scoring_ms: float | None = None
    scoring_prefill_ms: float | None = None
    held_bytes: int | None = None
    before_bytes: int | None = None
    prefill_peak_bytes: int | None = None
    decode_peak_bytes: int | None = None
    masked_layers_prefill: int | None = None
    masked_layers_decode: int | None = None
    prefill_allowed: float | None = None
    decode_allowed: float | None = None
    prefill_speedup: float | None = None
    decode_speedup: float | None = None
    generate_ms: float | None = None
    generate_speedup: float | None = None
    scoring_share: float | None = None

    def against(self, full: Cell) -> Cell:
        """Return the cell with its ratios to full context at the same context."""
        return attrs.evolve(
            self,
            prefill_speedup=_ratio(full.prefill_ms, self.prefill_ms),
            decode_speedup=_ratio(full.decode_ms, self.decode_ms),
            generate_speedup=(
                full.generate_ms / self.generate_ms
                if full.generate_ms
                and self.generate_ms
                and len(full.decode_ms) == len(self.decode_ms)
                else None
            ),
        )


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float | None:
    return median(theirs) / median(ours) if theirs and ours else None


@attrs.frozen
class Settings:
    """The settings of a measurement.

    Args:
        new_tokens: Tokens generated, the first by the prefill.
        repeats: Counted prefills of a cell, at most.
        cell_seconds: Counted prefills of a cell together take about this long at most; one is
            counted always. If one is expected to take longer, there is no rehearsal.
        limit_seconds: Seconds after which a cell ends, for prompts of up to 131,072 tokens; in
            proportion more for longer ones.
    """

    new_tokens: int = 33
    repeats: int = 3
    cell_seconds: float = 20.0
    limit_seconds: float = 120.0

    def limit_of(self, context: int) -> float:
        """Return the seconds after which a cell with a prompt of so many tokens ends."""
        return self.limit_seconds * max(1.0, context / 131072)

    def repeats_of(self, rehearsal_ms: float) -> int:
        """Return the number of measured prefills, if the rehearsal took ``rehearsal_ms``."""
        return max(1, min(self.repeats, int(self.cell_seconds * 1e3 / rehearsal_ms)))


@attrs.frozen
class Plan:
    """A policy, and the way in which a cell's prompt is read.

    Args:
        policy: None for Transformers' own caches.
        chunk: Tokens of the prompt that are read at once; None for all.
    """

    policy: CachePolicy | None
    chunk: int | None = None
