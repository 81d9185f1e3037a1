"""Measure accuracy, memory and speed of policies, and provide the `kvpolicy` command.

Importing it brings in neither torch, Transformers nor the optional packages of the command and the
pictures; what needs them imports them when it is called.
"""

from typing import TYPE_CHECKING

from kvpolicy.lazy import lazy_names

if TYPE_CHECKING:
    from kvpolicy.evaluation.analysis.attention import (
        Overlap,
        attention_recall,
        topk_overlap,
        window_attention,
    )
    from kvpolicy.evaluation.analysis.distances import OutputDistances, output_distances
    from kvpolicy.evaluation.comparison.accuracy import Score, measure_accuracy
    from kvpolicy.evaluation.comparison.latency import Latencies, Phase, Timing, measure_latency
    from kvpolicy.evaluation.comparison.rows import Comparison, Row, compare
    from kvpolicy.evaluation.comparison.sweep import (
        HeldOut,
        RateSweep,
        Sweep,
        sweep_rates,
        sweep_tsp_layers,
    )
    from kvpolicy.evaluation.estimate.cost import Estimate, estimate_cost
    from kvpolicy.evaluation.estimate.model_shape import LayerShape, ModelShape
    from kvpolicy.evaluation.estimate.shapes import load_shape, shape_of
    from kvpolicy.evaluation.models import Loaded, load
    from kvpolicy.evaluation.tasks.prompts import Prompt, needle_prompts, read_prompts
    from kvpolicy.evaluation.variant import Variant, variants
    from kvpolicy.registry import build_policy
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "kvpolicy.registry": ("build_policy",),
            "kvpolicy.evaluation.analysis.attention": (
                "Overlap",
                "attention_recall",
                "topk_overlap",
                "window_attention",
            ),
            "kvpolicy.evaluation.analysis.distances": ("OutputDistances", "output_distances"),
            "kvpolicy.evaluation.comparison.accuracy": ("Score", "measure_accuracy"),
            "kvpolicy.evaluation.comparison.latency": (
                "Latencies",
                "Phase",
                "Timing",
                "measure_latency",
            ),
            "kvpolicy.evaluation.comparison.rows": ("Comparison", "Row", "compare"),
            "kvpolicy.evaluation.comparison.sweep": (
                "HeldOut",
                "RateSweep",
                "Sweep",
                "sweep_rates",
                "sweep_tsp_layers",
            ),
            "kvpolicy.evaluation.variant": ("Variant", "variants"),
            "kvpolicy.evaluation.estimate.cost": ("Estimate", "estimate_cost"),
            "kvpolicy.evaluation.estimate.model_shape": ("LayerShape", "ModelShape"),
            "kvpolicy.evaluation.estimate.shapes": ("load_shape", "shape_of"),
            "kvpolicy.evaluation.models": ("Loaded", "load"),
            "kvpolicy.evaluation.tasks.prompts": ("Prompt", "needle_prompts", "read_prompts"),
        },
    )

__all__ = [
    "Comparison",
    "Estimate",
    "HeldOut",
    "Latencies",
    "LayerShape",
    "Loaded",
    "ModelShape",
    "OutputDistances",
    "Overlap",
    "Phase",
    "Prompt",
    "RateSweep",
    "Row",
    "Score",
    "Sweep",
    "Timing",
    "Variant",
    "attention_recall",
    "build_policy",
    "compare",
    "estimate_cost",
    "load",
    "load_shape",
    "measure_accuracy",
    "measure_latency",
    "needle_prompts",
    "output_distances",
    "read_prompts",
    "shape_of",
    "sweep_rates",
    "sweep_tsp_layers",
    "topk_overlap",
    "variants",
    "window_attention",
]
