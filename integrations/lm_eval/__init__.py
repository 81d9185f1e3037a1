"""Run policies in lm-evaluation-harness with the model type ``kvpolicy``.

A question is read together with its document, or after the policy has chosen what to keep of it.
"""

from kvpolicy.integrations.lm_eval.costs import RequestCosts
from kvpolicy.integrations.lm_eval.model import PolicyLM
from kvpolicy.integrations.lm_eval.splitters import register_splitter

__all__ = ["PolicyLM", "RequestCosts", "register_splitter"]
