"""Apply policies inside Hugging Face Transformers."""

from kvpolicy.integrations.transformers.applying import AppliedPolicy, apply_policy
from kvpolicy.integrations.transformers.batching import wrap_continuous_batching
from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.conversation import Conversation, RereadingWarning
from kvpolicy.integrations.transformers.document import ReadDocument
from kvpolicy.integrations.transformers.generation import wrap_generate
from kvpolicy.integrations.transformers.state.report import CacheReport, LayerReport
from kvpolicy.integrations.transformers.state.storage import (
    OffloadedStorage,
    PlainStorage,
    QuantizedStorage,
    Storage,
)
from kvpolicy.integrations.transformers.together import ReadTogether, read_together

__all__ = [
    "AppliedPolicy",
    "CacheReport",
    "Conversation",
    "LayerReport",
    "OffloadedStorage",
    "PlainStorage",
    "PolicyCache",
    "QuantizedStorage",
    "ReadDocument",
    "ReadTogether",
    "RereadingWarning",
    "Storage",
    "apply_policy",
    "read_together",
]

# `generate` is wrapped on import, not when the first cache is built: in
# `model.generate(cache=PolicyCache(...))` Python looks `generate` up before it builds the
# cache.
wrap_continuous_batching()
wrap_generate()
