"""The members of a `PolicyCache` that users have."""

import inspect

from transformers import Cache

from kvpolicy.integrations.transformers import PolicyCache

PUBLIC = {
    *("policy", "storage", "max_new_tokens", "propagated", "seen_lengths", "is_attached"),
    *("attached", "start_turn", "appending", "save", "load", "report"),
}
# Some models define caches of their own, with these methods.
ASKED_BY_MODELS = {"get_linear_cache", "set_linear_cache"}


def test_what_a_cache_adds_to_that_of_transformers() -> None:
    added = {
        name
        for name, _ in inspect.getmembers_static(PolicyCache)
        if not name.startswith("_") and not hasattr(Cache, name)
    }
    assert added == PUBLIC | ASKED_BY_MODELS
