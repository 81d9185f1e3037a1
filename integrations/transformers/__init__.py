"""Policies inside Hugging Face Transformers."""

from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.state.report import CacheReport, LayerReport
from kvpolicy.integrations.transformers.state.storage import (
    OffloadedStorage,
    PlainStorage,
    QuantizedStorage,
    Storage,
)

__all__ = [
    "CacheReport",
    "LayerReport",
    "OffloadedStorage",
    "PlainStorage",
    "PolicyCache",
    "QuantizedStorage",
    "Storage",
]
