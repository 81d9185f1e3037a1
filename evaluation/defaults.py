"""Names and default values that the command line's options show.

They have a module of their own, without torch, so that options are read before it is imported.
"""

from __future__ import annotations

# The bundled model.
NEEDLE = "needle"
# The first layer that answers as well as full context in `kvpolicy compare --sweep`, whose prompts
# are not those of the comparison.
NEEDLE_TSP_LAYER = 2
# Names of torch's dtypes.
DTYPE_NAMES = ("float32", "bfloat16", "float16")

MIN_NEEDLE_CONTEXT = 64
# Default number of tokens of the prompts that are made for it.
NEEDLE_CONTEXT = 1024
# Calibration draws other prompts, so that a layer is not chosen on the prompts that test it.
CALIBRATION_SEED_OFFSET = 2000
# Rules that choose a layer to drop tokens after, and what counts as close: a tenth of the final
# hidden state's length, squared.
CRITERIA = ("argmin", "earliest")
TOLERANCE = 0.01
# Rates of a comparison: the paper's two, and one low enough to tell methods apart.
RATES = (0.02, 0.1, 0.2)

# Tokens of an answer in an estimate.
ESTIMATED_ANSWER = 1024


def default_tsp_layer(name: str) -> int | None:
    """Return the layer after which FastKV drops tokens in a known model; None for others.

    Args:
        name: As for `kvpolicy.evaluation.load`.
    """
    return NEEDLE_TSP_LAYER if name == NEEDLE else None
