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
    from kvpolicy.evaluation.calibration.choice import measure_tsp_distances, select_tsp_layer
    from kvpolicy.evaluation.calibration.distances import Calibration, LayerDistance, TSPDistances
    from kvpolicy.evaluation.comparison.study import Comparison, Row, compare
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
            "kvpolicy.evaluation.calibration.choice": ("measure_tsp_distances", "select_tsp_layer"),
            "kvpolicy.evaluation.calibration.distances": (
                "Calibration",
                "LayerDistance",
                "TSPDistances",
            ),
            "kvpolicy.evaluation.comparison.study": ("Comparison", "Row", "compare"),
            "kvpolicy.evaluation.variant": ("Variant", "variants"),
            "kvpolicy.evaluation.estimate.cost": ("Estimate", "estimate_cost"),
            "kvpolicy.evaluation.estimate.model_shape": ("LayerShape", "ModelShape"),
            "kvpolicy.evaluation.estimate.shapes": ("load_shape", "shape_of"),
            "kvpolicy.evaluation.models": ("Loaded", "load"),
            "kvpolicy.evaluation.tasks.prompts": ("Prompt", "needle_prompts", "read_prompts"),
        },
    )

__all__ = [
    "Calibration",
    "Comparison",
    "Estimate",
    "LayerDistance",
    "LayerShape",
    "Loaded",
    "ModelShape",
    "OutputDistances",
    "Overlap",
    "Prompt",
    "Row",
    "TSPDistances",
    "Variant",
    "attention_recall",
    "build_policy",
    "compare",
    "estimate_cost",
    "load",
    "load_shape",
    "measure_tsp_distances",
    "needle_prompts",
    "output_distances",
    "read_prompts",
    "select_tsp_layer",
    "shape_of",
    "topk_overlap",
    "variants",
    "window_attention",
]
