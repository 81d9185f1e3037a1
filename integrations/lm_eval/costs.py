"""Measure what each request costs: tokens read and kept, bytes, seconds."""

from __future__ import annotations

import time

import attrs
import torch
from torch import Tensor
from transformers import LogitsProcessor

from kvpolicy.integrations.transformers import PolicyCache


@attrs.frozen
class RequestCosts:
    """The measured costs of one request: its tokens read and kept, bytes and seconds.

    Args:
        prompt_tokens: Tokens of the prompt, after truncation, padding not counted.
        kept_tokens: How many of them the cache holds after the prompt is read; the mean over the
            layers that hold tokens, and over their KV heads.
        bytes_held: Bytes of their keys and values, without the empty slots.
        prefill_seconds: Seconds from the start of the batch to the logits of its first answer
            token, divided by the number of rows, since the rows of a batch are read together.
        total_seconds: Seconds of the whole batch, answers included, divided by the number of rows.
    """

    prompt_tokens: int
    kept_tokens: float
    bytes_held: int
    prefill_seconds: float
    total_seconds: float


@attrs.frozen
class RowsHeld:
    """What a cache has seen and keeps, row by row; see `RequestCosts`."""

    tokens: tuple[int, ...]
    kept: tuple[float, ...]
    nbytes: tuple[int, ...]

    @staticmethod
    def of(cache: PolicyCache) -> RowsHeld:
        """Count the tokens and bytes that each row of a cache holds now."""
        pairs = [
            (layer.positions >= 0, report.held_bytes - report.padding_bytes)
            for layer, report in zip(cache.layers, cache.report().layers, strict=True)
            if layer.positions is not None
        ]
        rows = len(cache.seen_lengths)
        kept, nbytes = [0.0] * rows, [0.0] * rows
        for held, used in pairs:
            slots = held.sum(dim=2)  # [batch, kv_heads]
            for row in range(rows):
                kept[row] += float(slots[row].float().mean())
                nbytes[row] += used * int(slots[row].sum()) / max(int(slots.sum()), 1)
        return RowsHeld(
            cache.seen_lengths,
            tuple(each / len(pairs) for each in kept),
            tuple(round(each) for each in nbytes),
        )


class PrefillClock(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that measures prefill time and cache contents when first called."""

    def __init__(self, cache: PolicyCache) -> None:
        self.cache = cache
        self.begin = now()
        self.seconds: float | None = None
        self.held: RowsHeld | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores unchanged; record time and cache contents at the first call."""
        if self.held is None:
            self.seconds = now() - self.begin
            self.held = RowsHeld.of(self.cache)
        return scores

    def costs(self, rows: int) -> list[RequestCosts]:
        """Return the costs of each of ``rows`` prompts, once `generate` has ended."""
        held, total = self.held, now() - self.begin
        assert held is not None
        assert self.seconds is not None
        beams = len(held.tokens) // rows  # of a prompt, whose bytes are those of all its beams
        seconds = self.seconds / rows, total / rows
        return [
            RequestCosts(held.tokens[row], held.kept[row], beams * held.nbytes[row], *seconds)
            for row in range(0, len(held.tokens), beams)
        ]


def now() -> float:
    """Return the current time in seconds, once the GPU has finished its queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
