"""Measure a policy's share of a prefill: scoring, choosing, and storing what is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.clocks import TimedPolicy
from benchmarks.common import spread
from benchmarks.harness import pivot
from benchmarks.turns import take_turn
from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers.state.layer import PolicyLayer

HEADER = "share of prefill in scoring, choosing and taking over"


@contextmanager
def timed_storing() -> Iterator[list[float]]:
    """Time the storing of chosen keys and values; the list gets each layer's milliseconds."""
    original, spans = PolicyLayer.store, []

    def store(self: PolicyLayer, *args: Any, **how: Any) -> None:
        start = time.perf_counter()
        original(self, *args, **how)
        spans.append((time.perf_counter() - start) * 1e3)

    PolicyLayer.store = store  # type: ignore[method-assign]
    try:
        yield spans
    finally:
        PolicyLayer.store = original  # type: ignore[method-assign]


def overhead_of(
    model: PreTrainedModel, prompt: Tensor, policy: CachePolicy, rounds: int
) -> dict[str, Any]:
    """Time a policy's own work within prefills, on the processor.

    Args:
        model: The model.
        prompt: Token ids ``[batch, context]``.
        policy: The policy.
        rounds: Prefills.

    Returns:
        For every prefill, ``choosing_ms`` (the policy's decisions), ``storing_ms`` (gathering and
        storing what is kept) and ``prefill_ms``, which includes both; and ``share``, the spread of
        the sum of both over the prefill.
    """
    found: dict[str, Any] = {"choosing_ms": [], "storing_ms": [], "prefill_ms": []}
    for _ in range(rounds):
        timed = TimedPolicy(policy, model.device)
        with timed_storing() as spans:
            turn = take_turn(model, prompt, timed, 1)
        found["choosing_ms"].append(timed.total_ms())
        found["storing_ms"].append(sum(spans))
        found["prefill_ms"].append(turn.prefill.wall_ms)
    shares = [(a + b) / c for a, b, c in zip(*found.values(), strict=True)]
    return {**found, "share": spread(shares)}


def overhead_table(rows: list[dict[str, Any]]) -> str:
    """Return a table: a line per method, a column per length; 80 columns fit eight lengths."""
    heads = {"policy": ("method", 15)}
    table = pivot(rows, heads, "context", lambda row: row["share"]["median"], 8, ".2%")
    return f"{HEADER}\n{table}"
