"""Names and default values that the command line's options show.

They have a module of their own, without torch, so that options are read before it is imported.
"""

# Names of torch's dtypes.
DTYPE_NAMES = ("float32", "bfloat16", "float16")

# Calibration draws other prompts, so that a layer is not chosen on the prompts that test it.
CALIBRATION_SEED_OFFSET = 2000
# Rules that choose a layer to drop tokens after, and what counts as close: a tenth of the final
# hidden state's length, squared.
CRITERIA = ("argmin", "earliest")
TOLERANCE = 0.01
# The rates of the papers.
RATES = (0.1, 0.2)
# The name of the policy that keeps everything.
FULL_CONTEXT = "full_context"
