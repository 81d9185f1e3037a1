"""Measure the time a policy adds to a prefill: scoring, choosing, and storing."""

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
    """Time how long layers store their kept keys and values; times go to the list."""
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
    """Measure the time that a policy adds to prefills on the processor.

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
    """Return a table of added times: a line per method, a column per length."""
    heads = {"policy": ("method", 15)}
    table = pivot(rows, heads, "context", lambda row: row["share"]["median"], 8, ".2%")
    return f"{HEADER}\n{table}"
