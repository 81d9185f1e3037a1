"""Run the harness's own command, ``lm_eval``, with the model type ``kvpolicy`` registered.

``python -m kvpolicy.integrations.lm_eval`` takes the arguments of ``lm_eval``. The harness does not
read entry points to find models: it knows a model type once its module is imported.
"""

from lm_eval.__main__ import cli_evaluate

import kvpolicy.integrations.lm_eval  # noqa: F401 - registers the model type

if __name__ == "__main__":
    cli_evaluate()
