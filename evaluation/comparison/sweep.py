"""Sweep FastKV's accuracy over TSP layer, TSP rate and retention rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.checks import check_rate
from kvpolicy.evaluation.calibration.distances import Calibration
from kvpolicy.evaluation.comparison.accuracy import Score, measure_accuracy
from kvpolicy.evaluation.comparison.rows import score_data
from kvpolicy.evaluation.defaults import RATES
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.tasks.prompts import Prompt
from kvpolicy.evaluation.variant import variants
from kvpolicy.policies import FastKV, FullContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A layer must not be chosen on the prompts that it is then measured on: a sweep draws others.
SEED_OFFSET = 1000

# Both rates of a sweep of rates: from the bundled model's limit to where nothing is lost any more.
GRID = (0.02, 0.05, 0.1, 0.2, 0.4)


@attrs.frozen
class HeldOut:
    """FastKV's accuracy when it drops tokens after the calibrated and after the best layer.

    Args:
        retention_rate: The rate.
        calibrated_layer: The layer that calibration chose, on other prompts.
        calibrated: Its exact match by kind of prompt.
        best_layer: The most accurate layer on these very prompts, by the mean over the kinds; the
            earliest of equals.
        best: Its exact match by kind of prompt.
    """

    retention_rate: float
    calibrated_layer: int
    calibrated: dict[str, Score]
    best_layer: int
    best: dict[str, Score]

    def as_data(self) -> dict[str, Any]:
        """Return the two layers' accuracy as a dict for JSON."""
        return {
            "retention_rate": self.retention_rate,
            "calibrated_layer": self.calibrated_layer,
            "calibrated": _scores_data(self.calibrated),
            "best_layer": self.best_layer,
            "best": _scores_data(self.best),
        }


@attrs.frozen
class Sweep:
    """FastKV's accuracy by the layer after which it drops tokens, for every layer.

    Args:
        scores: For every retention rate, one entry a layer: exact match by kind of prompt.
        full: Full context on the same prompts.
        calibration: The layer chosen on other prompts without looking at answers, if asked for.
    """

    scores: dict[float, tuple[dict[str, Score], ...]]
    full: dict[str, Score]
    calibration: Calibration | None = None

    @property
    def held_out(self) -> list[HeldOut]:
        """Return the calibrated and the best layer per retention rate; empty if not calibrated."""
        if self.calibration is None:
            return []
        chosen = self.calibration.layer
        found = []
        for rate, layers in self.scores.items():
            means = [fmean(score.rate for score in scores.values()) for scores in layers]
            best = means.index(max(means))
            found.append(HeldOut(rate, chosen, layers[chosen], best, layers[best]))
        return found

    def as_data(self) -> dict[str, Any]:
        """Return the sweep's accuracy by layer as a dict for JSON."""
        data: dict[str, Any] = {
            "full_context": _scores_data(self.full),
            "layers": [
                {"tsp_layer": layer, "retention_rate": rate, "exact_match": _scores_data(scores)}
                for rate, layers in self.scores.items()
                for layer, scores in enumerate(layers)
            ],
        }
        if self.calibration is not None:
            data["calibration"] = self.calibration.as_data()
            data["held_out"] = [each.as_data() for each in self.held_out]
        return data


@attrs.frozen
class RateSweep:
    """FastKV's accuracy by the fraction of tokens that pass the drop and the fraction kept.

    Args:
        scores: By TSP rate and retention rate: exact match by kind of prompt. A retention rate
            above the TSP rate has no entry: a layer cannot keep more tokens than reach it.
        full: Full context on the same prompts.
        tsp_layer: The layer after which tokens were dropped.
    """

    scores: Mapping[tuple[float, float], dict[str, Score]]
    full: dict[str, Score]
    tsp_layer: int

    @property
    def tsp_rates(self) -> list[float]:
        """The fractions of tokens passed on by FastKV's drop, in the order given."""
        return list(dict.fromkeys(tsp_rate for tsp_rate, _ in self.scores))

    @property
    def retention_rates(self) -> list[float]:
        """The fractions of tokens kept in each layer's cache, ascending."""
        return sorted({rate for _, rate in self.scores})

    def as_data(self) -> dict[str, Any]:
        """Return the sweep's accuracy by rates as a dict for JSON."""
        return {
            "tsp_layer": self.tsp_layer,
            "full_context": _scores_data(self.full),
            "rates": [
                {
                    "tsp_rate": tsp_rate,
                    "retention_rate": rate,
                    "exact_match": _scores_data(scores),
                }
                for (tsp_rate, rate), scores in self.scores.items()
            ],
        }


def sweep_tsp_layers(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    rates: Sequence[float] = RATES,
    *,
    calibration: Calibration | None = None,
    progress: Progress = silent,
) -> Sweep:
    """Measure FastKV's accuracy with the drop after each of the model's layers.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        prompts: At least one. To choose a layer by, take others than the ones to report on.
        rates: Retention rates in (0, 1]; the TSP rate is 0.2, or the retention rate if larger.
        calibration: A layer chosen on other prompts, to be held against the best one on these.
        progress: Told of every batch.

    Raises:
        ValueError: There are no prompts, or a rate is out of its range.
    """
    by_rate: dict[float, list[dict[str, Score]]] = {rate: [] for rate in rates}
    full = _full_context(model, prompts, progress)
    for layer in range(model.config.num_hidden_layers):
        for variant in variants(["fastkv"], rates, tsp_layer=layer):
            assert variant.retention_rate is not None
            stage = f"sweep: {variant.label}, layer {layer}"
            found = measure_accuracy(model, prompts, variant.policy, progress=progress, stage=stage)
            by_rate[variant.retention_rate].append(found)
    return Sweep({rate: tuple(found) for rate, found in by_rate.items()}, full, calibration)


def sweep_rates(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    tsp_rates: Sequence[float] = GRID,
    retention_rates: Sequence[float] = GRID,
    *,
    tsp_layer: int | None = None,
    progress: Progress = silent,
) -> RateSweep:
    """Measure FastKV's accuracy for several fractions of tokens passed on and of tokens kept.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        prompts: At least one.
        tsp_rates: Fractions of the context that go on, in (0, 1].
        retention_rates: Fractions of the context that every layer keeps, in (0, 1].
        tsp_layer: The layer after which tokens are dropped; None for FastKV's default.
        progress: Told of every batch.

    Raises:
        ValueError: There are no prompts, the layer lies outside the model, a rate is out of its
            range, or no retention rate is as low as a TSP rate.

    Source: FastKV (arXiv 2502.01068), the sweep of TSP rate and retention rate.
    """
    policies = {
        (tsp_rate, rate): FastKV(tsp_layer=tsp_layer, tsp_rate=tsp_rate, retention_rate=rate)
        for tsp_rate in tsp_rates
        for rate in retention_rates
        if check_rate("retention_rates", rate) <= check_rate("tsp_rates", tsp_rate)
    }
    if not policies:
        raise ValueError(
            "retention_rates must hold one that does not exceed one of tsp_rates, got "
            f"{list(retention_rates)} and {list(tsp_rates)}"
        )
    (layer,) = FastKV(tsp_layer=tsp_layer).propagation.acting_layers(model.config.num_hidden_layers)
    full = _full_context(model, prompts, progress)
    scores = {}
    for (tsp_rate, rate), policy in policies.items():
        stage = f"sweep: TSP rate {tsp_rate:g}, retention rate {rate:g}"
        found = measure_accuracy(model, prompts, policy, progress=progress, stage=stage)
        scores[tsp_rate, rate] = found
    return RateSweep(scores, full, layer)


def _full_context(
    model: PreTrainedModel, prompts: Sequence[Prompt], progress: Progress
) -> dict[str, Score]:
    return measure_accuracy(
        model, prompts, FullContext(), progress=progress, stage="sweep: full context"
    )


def _scores_data(scores: Mapping[str, Score]) -> dict[str, Any]:
    return {kind: score_data(score) for kind, score in scores.items()}
