"""Measure accuracy, memory and speed of policies, and provide the `kvpolicy` command.

Importing it brings in neither torch, Transformers nor the optional packages of the command and the
pictures; what needs them imports them when it is called.
"""

from typing import TYPE_CHECKING

from kvpolicy.lazy import lazy_names

if TYPE_CHECKING:
    from kvpolicy.evaluation.analysis.attention import Overlap as Overlap
    from kvpolicy.evaluation.analysis.attention import attention_recall as attention_recall
    from kvpolicy.evaluation.analysis.attention import topk_overlap as topk_overlap
    from kvpolicy.evaluation.analysis.attention import window_attention as window_attention
    from kvpolicy.evaluation.analysis.distances import OutputDistances as OutputDistances
    from kvpolicy.evaluation.analysis.distances import output_distances as output_distances
    from kvpolicy.evaluation.asking import Asked as Asked
    from kvpolicy.evaluation.asking import Asker as Asker
    from kvpolicy.evaluation.cells import Cell as Cell
    from kvpolicy.evaluation.cells import Compared as Compared
    from kvpolicy.evaluation.cells import cells_of as cells_of
    from kvpolicy.evaluation.cells import compared as compared
    from kvpolicy.evaluation.chosen import variants as variants
    from kvpolicy.evaluation.comparison.study import Comparison as Comparison
    from kvpolicy.evaluation.comparison.study import Row as Row
    from kvpolicy.evaluation.comparison.study import compare as compare
    from kvpolicy.evaluation.estimate.cost import Estimate as Estimate
    from kvpolicy.evaluation.estimate.cost import estimate_cost as estimate_cost
    from kvpolicy.evaluation.estimate.model_shape import LayerShape as LayerShape
    from kvpolicy.evaluation.estimate.model_shape import ModelShape as ModelShape
    from kvpolicy.evaluation.estimate.shapes import load_shape as load_shape
    from kvpolicy.evaluation.estimate.shapes import shape_of as shape_of
    from kvpolicy.evaluation.models import Loaded as Loaded
    from kvpolicy.evaluation.models import load as load
    from kvpolicy.evaluation.scoring import Outcome as Outcome
    from kvpolicy.evaluation.scoring import outcomes as outcomes
    from kvpolicy.evaluation.tasks.naming import task_named as task_named
    from kvpolicy.evaluation.tasks.question import Question as Question
    from kvpolicy.evaluation.variant import Variant as Variant
    from kvpolicy.registry import build_policy as build_policy
else:
    __getattr__, __dir__, __all__ = lazy_names(
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
