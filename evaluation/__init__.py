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
    from kvpolicy.evaluation.asking import Asked, Asker
    from kvpolicy.evaluation.cells import Cell, Compared, cells_of, compared
    from kvpolicy.evaluation.chosen import variants
    from kvpolicy.evaluation.comparison.study import Comparison, Row, compare
    from kvpolicy.evaluation.estimate.cost import Estimate, estimate_cost
    from kvpolicy.evaluation.estimate.model_shape import LayerShape, ModelShape
    from kvpolicy.evaluation.estimate.shapes import load_shape, shape_of
    from kvpolicy.evaluation.models import Loaded, load
    from kvpolicy.evaluation.scoring import Outcome, outcomes
    from kvpolicy.evaluation.tasks.naming import task_named
    from kvpolicy.evaluation.tasks.question import Question
    from kvpolicy.evaluation.variant import Variant
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
            "kvpolicy.evaluation.asking": ("Asked", "Asker"),
            "kvpolicy.evaluation.cells": ("Cell", "Compared", "cells_of", "compared"),
            "kvpolicy.evaluation.chosen": ("variants",),
            "kvpolicy.evaluation.comparison.study": ("Comparison", "Row", "compare"),
            "kvpolicy.evaluation.estimate.cost": ("Estimate", "estimate_cost"),
            "kvpolicy.evaluation.estimate.model_shape": ("LayerShape", "ModelShape"),
            "kvpolicy.evaluation.estimate.shapes": ("load_shape", "shape_of"),
            "kvpolicy.evaluation.models": ("Loaded", "load"),
            "kvpolicy.evaluation.scoring": ("Outcome", "outcomes"),
            "kvpolicy.evaluation.tasks.naming": ("task_named",),
            "kvpolicy.evaluation.tasks.question": ("Question",),
            "kvpolicy.evaluation.variant": ("Variant",),
        },
    )

__all__ = [
    "Asked",
    "Asker",
    "Cell",
    "Compared",
    "Comparison",
    "Estimate",
    "LayerShape",
    "Loaded",
    "ModelShape",
    "Outcome",
    "OutputDistances",
    "Overlap",
    "Question",
    "Row",
    "Variant",
    "attention_recall",
    "build_policy",
    "cells_of",
    "compare",
    "compared",
    "estimate_cost",
    "load",
    "load_shape",
    "outcomes",
    "output_distances",
    "shape_of",
    "task_named",
    "topk_overlap",
    "variants",
    "window_attention",
]
