"""Compare policies' accuracy, memory and speed on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.evaluation.comparison.accuracy import Score, measure_accuracy, measures
from kvpolicy.evaluation.comparison.latency import (
    Phase,
    Timing,
    held_after_prefill,
    measure_latency,
)
from kvpolicy.evaluation.comparison.speed import Speed
from kvpolicy.evaluation.comparison.variant import Variant
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.tasks.prompts import STEPS, Prompt
from kvpolicy.policies import FullContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FULL_CONTEXT = Variant("full_context", FullContext())
# Before the label of the policy whose row comes next.
ACCURACY_STAGE = "accuracy of "


@attrs.frozen
class Row:
    """One policy's results in a comparison: its scores, its times and what its cache holds.

    Args:
        variant: The policy.
        scores: By the prompts' measures: exact match by kind, and of long answers their steps.
        timing: Its times, and what its cache held after prefill. Of full context, the times of the
            model without kvpolicy.
    """

    variant: Variant
    scores: dict[str, Score]
    timing: Timing


@attrs.frozen
class Comparison:
    """The results of comparing policies with full context on the same prompts.

    Args:
        rows: One for each policy, full context first: speeds are against it.
        timed_tokens: Length of the prompt that times and memory were measured on.
    """

    rows: tuple[Row, ...]
    timed_tokens: int

    @property
    def baseline(self) -> Timing:
        """The times of the model without kvpolicy, on Transformers' own cache."""
        return self.rows[0].timing

    @property
    def kinds(self) -> list[str]:
        """The names of the scores, one per table column, in order."""
        return list(self.rows[0].scores)

    @property
    def speeds(self) -> list[Speed]:
        """The prefill and decoding speeds of every policy but full context."""
        before = self.baseline
        return [
            speed
            for row in self.rows[1:]
            for speed in (
                row.timing.prefill.speed(before.prefill),
                row.timing.decode.speed(before.decode),
            )
        ]

    def as_data(self) -> dict[str, Any]:
        """Return the comparison, with every round's times, as a dict for JSON.

        ``speedup`` is full context's time over the policy's: above 1 is faster. ``steady`` says
        whether its rounds agree (see `kvpolicy.evaluation.comparison.speed.Speed`). Full context
        has neither.
        """
        return {
            "timed_tokens": self.timed_tokens,
            "baseline": "full_context: the model without kvpolicy, on Transformers' DynamicCache",
            "rows": [self._row_data(row) for row in self.rows],
        }

    def _row_data(self, row: Row) -> dict[str, Any]:
        held = row.timing.held
        assert held is not None
        before = None if row is self.rows[0] else self.baseline
        return {
            "policy": row.variant.name,
            "retention_rate": row.variant.retention_rate,
            "parameters": dict(row.variant.parameters),
            **scores_data(row.scores),
            "tokens": {"seen": held.seen, "kept": held.kept},
            "kv_bytes": {
                "held": held.held_bytes,
                "padding": held.padding_bytes,
                "full": held.full_bytes,
                "share": held.share,
            },
            "prefill": phase_data(row.timing.prefill, before.prefill if before else None),
            "decode": phase_data(row.timing.decode, before.decode if before else None),
        }


class Listener:
    """Base of listeners told of a comparison's progress, to display it; does nothing."""

    def timed(
        self, variants: Sequence[Variant], timings: Sequence[Timing], kinds: Sequence[str]
    ) -> None:
        """Called with all policies' times and sizes, before any prompt is answered.

        Args:
            variants: The policies in the order of their rows, full context first.
            timings: Theirs, in the same order.
            kinds: The measures of the prompts that will be asked.
        """

    def row(self, row: Row) -> None:
        """Called with each policy's results when they are complete, in table order."""


def compare(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    variants: Sequence[Variant],
    *,
    rounds: int = 9,
    new_tokens: int = 16,
    timing_seconds: float | None = None,
    progress: Progress = silent,
    listener: Listener | None = None,
) -> Comparison:
    """Compare policies with full context on the same prompts.

    Time and memory are measured first, at batch 1 and in turns (see `measure_latency`), on the
    first of the prompts of median length; full context is the model without kvpolicy there. Then
    accuracy, policy by policy, in batches of prompts of one length. Threads and dtype are the
    caller's: ``torch.set_num_threads``, and the model's.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        prompts: At least one.
        variants: The policies, as made by `kvpolicy.evaluation.variants`. Full context is always
            measured, whether it is among them or not.
        rounds: Rounds of timing, at least 1; with fewer than 5 no speed counts as steady.
        new_tokens: Tokens decoded in each, at least 1.
        timing_seconds: After which no further round of timing is begun; None for no limit.
        progress: Told how far it is.
        listener: Told of the rows as they are done.

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
        variant.policy.check_model(model.config.num_hidden_layers)
    listener = listener or Listener()
    by_length = sorted((prompt.input_ids for prompt in prompts), key=len)
    timed = by_length[len(by_length) // 2]
    latencies = measure_latency(
        model,
        timed,
        {variant.label: variant.policy for variant in chosen[1:]},
        rounds=rounds,
        new_tokens=new_tokens,
        seconds=timing_seconds,
        progress=progress,
    )
    held = held_after_prefill(model, timed, FULL_CONTEXT.policy)
    timings = [attrs.evolve(latencies.baseline, held=held), *latencies.timings.values()]
    listener.timed(chosen, timings, measures(prompts))
    rows = []
    for variant, timing in zip(chosen, timings, strict=True):
        stage = f"{ACCURACY_STAGE}{variant.label}"
        scores = measure_accuracy(model, prompts, variant.policy, progress=progress, stage=stage)
        rows.append(Row(variant, scores, timing))
        listener.row(rows[-1])
    return Comparison(tuple(rows), len(timed))


def scores_data(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Return a row's scores as a dict for JSON: exact answers, and right steps if counted."""
    data: dict[str, Any] = {"exact_match": {}}
    for name, score in scores.items():
        measure = "right_steps" if name.endswith(STEPS) else "exact_match"
        data.setdefault(measure, {})[name.removesuffix(STEPS)] = score_data(score)
    return data


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
