"""Evaluation: accuracy, memory and speed of policies, and the `kvpolicy` command.

Importing it brings in neither Transformers nor the optional packages of the command and the
pictures; what needs them imports them when it is called.
"""

from kvpolicy.evaluation.accuracy import Score, measure_accuracy
from kvpolicy.evaluation.comparison import Comparison, Row, compare
from kvpolicy.evaluation.latency import Latencies, Phase, Timing, measure_latency
from kvpolicy.evaluation.models import Loaded, load
from kvpolicy.evaluation.prompts import Prompt, needle_prompts, read_prompts
from kvpolicy.evaluation.sweep import Sweep, sweep_tsp_layers
from kvpolicy.evaluation.variant import Variant, build_policy, variants

__all__ = [
    "Comparison",
    "Latencies",
    "Loaded",
    "Phase",
    "Prompt",
    "Row",
    "Score",
    "Sweep",
    "Timing",
    "Variant",
    "build_policy",
    "compare",
    "load",
    "measure_accuracy",
    "measure_latency",
    "needle_prompts",
    "read_prompts",
    "sweep_tsp_layers",
    "variants",
]
