"""Evaluation: accuracy, memory and speed of policies, and the `kvpolicy` command.

Importing it brings in neither Transformers nor the optional packages of the command and the
pictures; what needs them imports them when it is called.
"""

from kvpolicy.evaluation.accuracy import Score, measure_accuracy
from kvpolicy.evaluation.analysis import Overlap, attention_recall, topk_overlap, window_attention
from kvpolicy.evaluation.analysis_distances import OutputDistances, output_distances
from kvpolicy.evaluation.calibration import measure_tsp_distances, select_tsp_layer
from kvpolicy.evaluation.comparison import Comparison, Row, compare
from kvpolicy.evaluation.estimate import Estimate, ModelShape, estimate
from kvpolicy.evaluation.latency import Latencies, Phase, Timing, measure_latency
from kvpolicy.evaluation.models import Loaded, load
from kvpolicy.evaluation.presets import load_shape, shape_of
from kvpolicy.evaluation.prompts import Prompt, needle_prompts, read_prompts
from kvpolicy.evaluation.sweep import HeldOut, RateSweep, Sweep, sweep_rates, sweep_tsp_layers
from kvpolicy.evaluation.tsp_distances import Calibration, LayerDistance, TSPDistances
from kvpolicy.evaluation.variant import Variant, build_policy, variants

__all__ = [
    "Calibration",
    "Comparison",
    "Estimate",
    "HeldOut",
    "Latencies",
    "LayerDistance",
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
    "TSPDistances",
    "Timing",
    "Variant",
    "attention_recall",
    "build_policy",
    "compare",
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
