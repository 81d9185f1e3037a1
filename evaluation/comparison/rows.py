"""Compare policies' accuracy, memory and speed on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch

from kvpolicy.evaluation.comparison.accuracy import Score, measure_accuracy
from kvpolicy.evaluation.comparison.latency import (
    Phase,
    Timing,
    held_after_prefill,
    measure_latency,
)
from kvpolicy.evaluation.comparison.speed import Speed
from kvpolicy.evaluation.comparison.timed import WARM_UP_TOKENS, Timed
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.tasks.prompts import Prompt
from kvpolicy.evaluation.variant import Variant
from kvpolicy.policies import FullContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FULL_CONTEXT = Variant("full_context", FullContext())


@attrs.frozen
class Row:
    """One policy's results in a comparison: its scores, its times and what its cache holds.

    Args:
        variant: The policy.
        scores: Exact match, by kind of prompt.
        timing: Its times, and what its cache held after prefill. Of full context, the times of the
            model without kvpolicy. None if it was not timed.
    """

    variant: Variant
    scores: dict[str, Score]
    timing: Timing | None


@attrs.frozen
class Comparison:
    """The results of comparing policies with full context on the same prompts.

    Args:
        rows: One for each policy, full context first: speeds are against it.
        timed_tokens: Length of the prompt that times and memory were measured on.
        timed_model: The model that read it, in words; None for the one that answered.
        processor_time: Whether times are of the processor, not of the clock.
    """

    rows: tuple[Row, ...]
    timed_tokens: int
    timed_model: str | None = None
    processor_time: bool = False

    @property
    def baseline(self) -> Timing:
        """The times of the model without kvpolicy, on Transformers' own cache."""
        timing = self.rows[0].timing
        assert timing is not None
        return timing

    @property
    def kinds(self) -> list[str]:
        """The names of the scores, one per table column, in order."""
        return list(self.rows[0].scores)

    @property
    def speeds(self) -> list[Speed]:
        """The prefill and decoding speeds of every policy that was timed but full context."""
        before = self.baseline
        return [
            speed
            for timing in (row.timing for row in self.rows[1:])
            if timing is not None
            for speed in (timing.prefill.speed(before.prefill), timing.decode.speed(before.decode))
        ]

    def as_data(self) -> dict[str, Any]:
        """Return the comparison, with every round's times, as a dict for JSON.

        ``speedup`` is full context's time over the policy's: above 1 is faster. ``steady`` says
        whether its rounds agree (see `kvpolicy.evaluation.comparison.speed.Speed`). Full context
        has neither. The tokens, bytes and times of a policy that was not timed are None.
        """
        return {
            "timed_tokens": self.timed_tokens,
            "timed_model": self.timed_model,
            "processor_time": self.processor_time,
            "baseline": "full_context: the model without kvpolicy, on Transformers' DynamicCache",
            "rows": [self._row_data(row) for row in self.rows],
        }

    def _row_data(self, row: Row) -> dict[str, Any]:
        return {
            "policy": row.variant.name,
            "retention_rate": row.variant.retention_rate,
            "retention_tokens": row.variant.retention_tokens,
            "parameters": dict(row.variant.parameters),
            **scores_data(row.scores),
            **_timing_data(row.timing, None if row is self.rows[0] else self.baseline),
        }


def _timing_data(timing: Timing | None, before: Timing | None) -> dict[str, Any]:
    """Return what was measured of one policy on the timed prompt, as a dict for JSON."""
    if timing is None:
        return dict.fromkeys(("tokens", "kv_bytes", "prefill", "decode"))
    held = timing.held
    assert held is not None
    return {
        "tokens": {"seen": held.seen, "kept": held.kept},
        "kv_bytes": {
            "held": held.held_bytes,
            "padding": held.padding_bytes,
            "full": held.full_bytes,
            "share": held.share,
        },
        "prefill": phase_data(timing.prefill, before.prefill if before else None),
        "decode": phase_data(timing.decode, before.decode if before else None),
    }


# Called with each policy's row when it is complete.
RowDone = Callable[[Row], None]


def compare(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    variants: Sequence[Variant],
    *,
    rounds: int = 9,
    new_tokens: int = 16,
    timing_seconds: float | None = None,
    again: int = 0,
    timed: Timed | None = None,
    timed_labels: Collection[str] | None = None,
    progress: Progress = silent,
    row_done: RowDone | None = None,
) -> Comparison:
    """Compare policies with full context on the same prompts.

    Time and memory are measured first, at batch 1 and in turns (see `measure_latency`), on the
    first of the prompts of median length, or on a model and prompt of their own; full context is
    the model without kvpolicy there. Then accuracy, policy by policy, in batches of prompts of one
    length. Threads and dtype are the caller's: ``torch.set_num_threads``, and the model's. A model
    and prompt of their own are timed on one thread, in processor time if they are on a processor.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        prompts: At least one.
        variants: The policies, as made by `kvpolicy.evaluation.variants`. Full context is always
            measured, whether it is among them or not.
        rounds: Rounds of timing, at least 1; with fewer than 5 no speed counts as steady.
        new_tokens: Tokens decoded in each, at least 1.
        timing_seconds: After which no further round of timing is begun; None for no limit.
        again: Further rounds, at most, of the policies whose speeds are not steady.
        timed: A model and prompt to time; None for the model and its prompt of median length.
        timed_labels: Which of the policies to time, by their labels; None for all.
        progress: Told how far it is.
        row_done: Called with each row when it is complete.

    Raises:
        ValueError: There are no prompts, two variants have one label, or a policy does not fit
            the model.
    """
    chosen = [FULL_CONTEXT, *(each for each in variants if each.name != FULL_CONTEXT.name)]
    labels = [variant.label for variant in chosen]
    if len(set(labels)) < len(labels):
        raise ValueError(f"variants must have different labels, got {', '.join(labels)}")
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    for variant in chosen:
        variant.check_model(model.config.num_hidden_layers)
    if timed is None:
        by_length = sorted((prompt.input_ids for prompt in prompts), key=len)
        at = Timed(model, tuple(by_length[len(by_length) // 2]), "")
    else:
        at = timed
    wanted = set(labels if timed_labels is None else timed_labels)
    with _threads(None if timed is None else 1):
        latencies = measure_latency(
            at.model,
            at.input_ids,
            {each.label: each.policy for each in chosen[1:] if each.label in wanted},
            rounds=rounds,
            new_tokens=new_tokens,
            seconds=timing_seconds,
            again=again,
            warm_up_tokens=None if timed is None else WARM_UP_TOKENS,
            processor_time=timed is not None and timed.processor_time,
            progress=progress,
        )
        held = held_after_prefill(at.model, at.input_ids, FULL_CONTEXT.policy)
    timings: dict[str, Timing] = {
        FULL_CONTEXT.label: attrs.evolve(latencies.baseline, held=held),
        **latencies.timings,
    }
    rows = []
    for variant in chosen:
        stage = f"answers of {variant.label}"
        scores = measure_accuracy(model, prompts, variant.policy, progress=progress, stage=stage)
        rows.append(Row(variant, scores, timings.get(variant.label)))
        if row_done is not None:
            row_done(rows[-1])
    return comparison_of(rows, timed)


def comparison_of(rows: Sequence[Row], timed: Timed | None) -> Comparison:
    """Return the comparison of rows, full context's first, all or those that are finished.

    Args:
        rows: At least one.
        timed: The model and prompt that were timed, if not those that answered.
    """
    timing = rows[0].timing
    assert timing is not None
    assert timing.held is not None
    tokens = timing.held.seen
    if timed is None:
        return Comparison(tuple(rows), tokens)
    return Comparison(tuple(rows), tokens, timed.words, timed.processor_time)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Compute with a number of threads inside the block; None for as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def scores_data(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Return a row's scores as a dict for JSON."""
    return {"exact_match": {kind: score_data(score) for kind, score in scores.items()}}


def score_data(score: Score) -> dict[str, Any]:
    """Return a score as a dict for JSON."""
    return {
        "rate": score.rate,
        "matches": score.matches,
        "count": score.count,
        "interval_95": list(score.interval),
    }


def phase_data(phase: Phase, baseline: Phase | None = None) -> dict[str, Any]:
    """Return prefill or decoding times as a dict for JSON, with speed-ups over a baseline."""
    data: dict[str, Any] = {
        "median_ms": phase.median_ms,
        "min_ms": min(phase.wall_ms),
        "max_ms": max(phase.wall_ms),
        "rounds_ms": list(phase.wall_ms),
        "rounds_cpu_ms": list(phase.cpu_ms),
    }
    if baseline is not None:
        speed = phase.speed(baseline)
        data["speedup"] = speed.median
        data["steady"] = speed.steady
        data["interval_90"] = speed.interval and list(speed.interval)
        data["rounds_speedup"] = list(speed.rounds)
    return data
