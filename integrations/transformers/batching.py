"""Refuse policy caches in continuous batching, which uses its own cache.

Otherwise Transformers would ignore the policy without a word.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin

from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers.applying import applied_to
from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.model.routing import users_of
from kvpolicy.integrations.transformers.surface import CACHE, CONTINUOUS_BATCHING

_lock = threading.Lock()


def wrap_continuous_batching() -> None:
    """Make Transformers' continuous batching refuse a policy cache.

    Calls without a policy cache, on a model that has none attached, pass straight through.
    """
    with _lock:
        for name in CONTINUOUS_BATCHING:
            original = getattr(GenerationMixin, name, None)  # defined by the class, or inherited
            if original is not None and not hasattr(original, "_kvpolicy_wraps"):
                setattr(GenerationMixin, name, _refusing(name, original))


def _refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = any(isinstance(each, PolicyCache) for each in (*args, *kwargs.values()))
        attached = any(users_of(each) for each in self.modules() if hasattr(each, "config"))
        if given or attached or applied_to(self) is not None:
            raise UnsupportedGenerationError(
                f"{name} must not be called with a PolicyCache, or for a model that has a cache "
                "attached or a policy applied: continuous batching uses its own cache, on which "
                "no policy acts; pad the prompts on the left and call model.generate(input_ids, "
                f"attention_mask=mask, {CACHE}=cache), or call it outside of `with "
                "cache.attached(model):` and `with apply_policy(model, policy):`"
            )
        return original(self, *args, **kwargs)

    entry._kvpolicy_wraps = original  # type: ignore[attr-defined]
    return entry
