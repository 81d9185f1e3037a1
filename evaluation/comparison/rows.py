"""Policies side by side: accuracy, memory and speed on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.evaluation.comparison.accuracy import Score, measure_accuracy
from kvpolicy.evaluation.comparison.latency import Phase, Timing, measure_latency
from kvpolicy.evaluation.comparison.variant import Variant
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.tasks.prompts import Prompt
from kvpolicy.policies import FullContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FULL_CONTEXT = Variant("full_context", FullContext())


@attrs.frozen
class Row:
    """What one policy did.

    Args:
        variant: The policy.
        scores: Exact match by kind of prompt.
        timing: Its times, and what its cache held after prefill.
    """

    variant: Variant
    scores: dict[str, Score]
    timing: Timing


@attrs.frozen
class Comparison:
    """What `compare` found.

    Args:
        rows: One for each policy, full context first.
        baseline: The model's times without kvpolicy, on Transformers' own cache: what speed-ups
            are against.
        timed_tokens: Length of the prompt that times and memory were measured on.
    """

    rows: tuple[Row, ...]
    baseline: Timing
    timed_tokens: int

    @property
    def kinds(self) -> list[str]:
        """The kinds of prompts, in the order of the columns."""
        return list(self.rows[0].scores)

    @property
    def unsteadiness(self) -> float:
        """How far speed-ups differ from round to round: interquartile range over median.

        That of the typical row, prefill or decoding, whichever is less steady; 0 for one round.
        """
        if len(self.baseline.prefill.wall_ms) < 2:
            return 0.0
        pairs = [
            (
                _relative_spread(row.timing.prefill.speedups(self.baseline.prefill)),
                _relative_spread(row.timing.decode.speedups(self.baseline.decode)),
            )
            for row in self.rows
        ]
        return max(median(prefill for prefill, _ in pairs), median(decode for _, decode in pairs))

    def as_data(self) -> dict[str, Any]:
        """All numbers, with every round's times, as plain data for JSON.

        ``speedup`` is the baseline's time over the policy's: above 1 is faster.
        """
        return {
            "timed_tokens": self.timed_tokens,
            "unsteadiness": self.unsteadiness,
            "baseline": {
                "what": "the model without kvpolicy, on Transformers' own DynamicCache",
                "prefill": phase_data(self.baseline.prefill),
                "decode": phase_data(self.baseline.decode),
            },
            "rows": [self._row_data(row) for row in self.rows],
        }

    def _row_data(self, row: Row) -> dict[str, Any]:
        held = row.timing.held
        assert held is not None
        return {
            "policy": row.variant.name,
            "retention_rate": row.variant.retention_rate,
            "parameters": dict(row.variant.parameters),
            "exact_match": {kind: score_data(score) for kind, score in row.scores.items()},
            "tokens": {"seen": held.seen, "kept": held.kept},
            "kv_bytes": {
                "held": held.held_bytes,
                "padding": held.padding_bytes,
                "full": held.full_bytes,
                "share": held.share,
            },
            "prefill": phase_data(row.timing.prefill, self.baseline.prefill),
            "decode": phase_data(row.timing.decode, self.baseline.decode),
        }


def compare(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    variants: Sequence[Variant],
    *,
    rounds: int = 9,
    new_tokens: int = 32,
    progress: Progress = silent,
) -> Comparison:
    """Hold policies against full context on the same prompts.

    Accuracy is measured first, in batches of prompts of one length. Then time and memory, at batch
    1 and in turns (see `measure_latency`), on the first of the prompts of median length. Threads
    and dtype are the caller's: ``torch.set_num_threads``, and the model's.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        prompts: At least one.
        variants: The policies, as made by `kvpolicy.evaluation.variants`. Full context is always
            measured, whether it is among them or not.
        rounds: Rounds of timing, at least 1.
        new_tokens: Tokens decoded in each, at least 1.
        progress: Told how far it is.

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
    scores = [
        measure_accuracy(
            model, prompts, variant.policy, progress=progress, stage=f"accuracy of {variant.label}"
        )
        for variant in chosen
    ]
    by_length = sorted((prompt.input_ids for prompt in prompts), key=len)
    timed = by_length[len(by_length) // 2]
    latencies = measure_latency(
        model,
        timed,
        {variant.label: variant.policy for variant in chosen},
        rounds=rounds,
        new_tokens=new_tokens,
        progress=progress,
    )
    rows = (
        Row(variant, score, latencies.timings[variant.label])
        for variant, score in zip(chosen, scores, strict=True)
    )
    return Comparison(tuple(rows), latencies.baseline, len(timed))


def _relative_spread(values: Sequence[float]) -> float:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def score_data(score: Score) -> dict[str, Any]:
    """A score as plain data."""
    return {
        "rate": score.rate,
        "matches": score.matches,
        "count": score.count,
        "interval_95": list(score.interval),
    }


def phase_data(phase: Phase, baseline: Phase | None = None) -> dict[str, Any]:
    """A phase's times as plain data, with speed-ups where there is a baseline."""
    data: dict[str, Any] = {
        "median_ms": phase.median_ms,
        "min_ms": min(phase.wall_ms),
        "max_ms": max(phase.wall_ms),
        "rounds_ms": list(phase.wall_ms),
        "rounds_cpu_ms": list(phase.cpu_ms),
    }
    if baseline is not None:
        data["speedup"] = phase.speedup(baseline)
        data["rounds_speedup"] = list(phase.speedups(baseline))
    return data
