"""Policies inside lm-evaluation-harness: the model type ``kvpolicy``, and two ways to ask."""

from kvpolicy.integrations.lm_eval.costs import RequestCosts
from kvpolicy.integrations.lm_eval.model import PolicyLM
from kvpolicy.integrations.lm_eval.splitters import register_splitter

__all__ = ["PolicyLM", "RequestCosts", "register_splitter"]
