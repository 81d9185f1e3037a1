"""Measure accuracy, memory and speed of policies, and provide the `kvpolicy` command.

Importing it brings in neither Transformers nor the optional packages of the command and the
pictures; what needs them imports them when it is called.
"""

from kvpolicy.building import build_policy
from kvpolicy.evaluation.analysis.attention import (
    Overlap,
    attention_recall,
    topk_overlap,
    window_attention,
)
from kvpolicy.evaluation.analysis.distances import OutputDistances, output_distances
from kvpolicy.evaluation.calibration.choice import measure_tsp_distances, select_tsp_layer
from kvpolicy.evaluation.calibration.distances import Calibration, LayerDistance, TSPDistances
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
from kvpolicy.evaluation.comparison.variant import Variant, variants
from kvpolicy.evaluation.compression.compress import compress_prompt
from kvpolicy.evaluation.compression.compressed import CompressedPrompt
from kvpolicy.evaluation.compression.scoring import (
    FilterLayerScorer,
    LookAheadScorer,
    PromptSaliency,
    PromptScorer,
)
from kvpolicy.evaluation.cost.estimate import Estimate, estimate
from kvpolicy.evaluation.cost.model_shape import LayerShape, ModelShape
from kvpolicy.evaluation.cost.shapes import load_shape, shape_of
from kvpolicy.evaluation.models import Loaded, load
from kvpolicy.evaluation.tasks.prompts import Prompt, needle_prompts, read_prompts

__all__ = [
    "Calibration",
    "Comparison",
    "CompressedPrompt",
    "Estimate",
    "FilterLayerScorer",
    "HeldOut",
    "Latencies",
    "LayerDistance",
    "LayerShape",
    "Loaded",
    "LookAheadScorer",
    "ModelShape",
    "OutputDistances",
    "Overlap",
    "Phase",
    "Prompt",
    "PromptSaliency",
    "PromptScorer",
    "RateSweep",
    "Row",
    "Score",
    "Sweep",
    "TSPDistances",
    "Timing",
    "Variant",
    "attention_recall",
    "build_policy",
    "compare",
    "compress_prompt",
    "estimate",
    "load",
    "load_shape",
    "measure_accuracy",
    "measure_latency",
    "measure_tsp_distances",
    "needle_prompts",
    "output_distances",
    "read_prompts",
    "select_tsp_layer",
    "shape_of",
    "sweep_rates",
    "sweep_tsp_layers",
    "topk_overlap",
    "variants",
    "window_attention",
]
