"""Accuracy by TSP layer: after which layer may FastKV drop tokens?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.evaluation.accuracy import Score, measure_accuracy
from kvpolicy.evaluation.comparison import score_data
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.prompts import Prompt
from kvpolicy.evaluation.variant import RATES, variants
from kvpolicy.policies import FullContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A layer must not be chosen on the prompts that it is then measured on: a sweep draws others.
SEED_OFFSET = 1000


@attrs.frozen
class Sweep:
    """Accuracy of FastKV by TSP layer.

    Args:
        scores: For every retention rate, one entry a layer: exact match by kind of prompt.
        full: Full context on the same prompts.
    """

    scores: dict[float, tuple[dict[str, Score], ...]]
    full: dict[str, Score]

    def as_data(self) -> dict[str, Any]:
        """All numbers as plain data for JSON."""
        return {
            "full_context": {kind: score_data(score) for kind, score in self.full.items()},
            "layers": [
                {
                    "tsp_layer": layer,
                    "retention_rate": rate,
                    "exact_match": {kind: score_data(score) for kind, score in scores.items()},
                }
                for rate, layers in self.scores.items()
                for layer, scores in enumerate(layers)
            ],
        }


def sweep_tsp_layers(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    rates: Sequence[float] = RATES,
    *,
    progress: Progress = silent,
) -> Sweep:
    """Measure FastKV's accuracy with the drop after each of the model's layers.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        prompts: At least one. To choose a layer by, take others than the ones to report on.
        rates: Retention rates in (0, 1]; the TSP rate is 0.2, or the retention rate if larger.
        progress: Told of every batch.

    Raises:
        ValueError: There are no prompts, or a rate is out of its range.
    """
    by_rate: dict[float, list[dict[str, Score]]] = {rate: [] for rate in rates}
    full = measure_accuracy(
        model, prompts, FullContext(), progress=progress, stage="sweep: full context"
    )
    for layer in range(model.config.num_hidden_layers):
        for variant in variants(["fastkv"], rates, tsp_layer=layer):
            assert variant.retention_rate is not None
            stage = f"sweep: {variant.label}, layer {layer}"
            found = measure_accuracy(model, prompts, variant.policy, progress=progress, stage=stage)
            by_rate[variant.retention_rate].append(found)
    return Sweep({rate: tuple(found) for rate, found in by_rate.items()}, full)
