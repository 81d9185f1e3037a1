"""Names and default values that options of the command line tell.

They have a module of their own, without torch, so that options are read before it is imported.
"""

from __future__ import annotations

NEEDLE = "needle"
LONG_ANSWERS = "long_answers"
# The bundled models by name, and where each is loaded.
BUNDLED = {
    name: f"kvpolicy.evaluation.tasks.{name}" for name in (NEEDLE, "ruler_words", LONG_ANSWERS)
}
# The first layer that answers as full context does in `kvpolicy compare --sweep`, whose prompts are
# others than those it compares on.
NEEDLE_TSP_LAYER = 2
# Names of torch's dtypes.
DTYPE_NAMES = ("float32", "bfloat16", "float16")

MIN_NEEDLE_CONTEXT = 64
# Tokens of the prompts that are made for a bundled model, where no other length is asked for.
OWN_CONTEXTS = {NEEDLE: 1024, LONG_ANSWERS: 256}
# A layer must not be chosen on the prompts that it is then measured on: calibration draws others.
CALIBRATION_SEED_OFFSET = 2000
# Of a comparison: the paper's two rates, and one so low that the bundled model tells methods apart.
RATES = (0.02, 0.1, 0.2)

# Of compressed prompts: the share that is kept, and where a chunk may end.
COMPRESSION_RATE = 0.2
ALIGNMENT_NAMES = ("line", "word", "token")
# How a model may attend in an estimate of memory.
ATTENTION_NAMES = ("sdpa", "flash", "eager")


def default_tsp_layer(name: str) -> int | None:
    """Return the layer after which FastKV drops tokens in a known model; else None.

    Args:
        name: As for `kvpolicy.evaluation.load`.
    """
    return NEEDLE_TSP_LAYER if name == NEEDLE else None
