"""Policies inside Hugging Face Transformers."""

from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.report import CacheReport, LayerReport

__all__ = ["CacheReport", "LayerReport", "PolicyCache"]
