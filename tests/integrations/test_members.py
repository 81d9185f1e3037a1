"""The members of a `PolicyCache` that users have, and those that only the library needs."""

import inspect
from typing import Any

import pytest
from transformers import Cache

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import SnapKV
from kvpolicy.renamed import Moved

PUBLIC = {
    *("policy", "storage", "max_new_tokens", "propagated", "seen_lengths", "is_attached"),
    *("attached", "start_turn", "appending", "save", "load", "report"),
}
# Some models define caches of their own, with these methods.
ASKED_BY_MODELS = {"get_linear_cache", "set_linear_cache"}


def test_what_a_cache_adds_to_that_of_transformers() -> None:
    added = {
        name
        for name, member in inspect.getmembers_static(PolicyCache)
        if not name.startswith("_") and not hasattr(Cache, name) and not isinstance(member, Moved)
    }
    assert added == PUBLIC | ASKED_BY_MODELS


@pytest.mark.parametrize("name", ["reader", "static", "check_thread"])
def test_what_only_the_library_needs(name: str) -> None:
    cache: Any = PolicyCache(SnapKV())
    message = rf"^PolicyCache\.{name} is deprecated, since only the library itself needs it$"
    with pytest.warns(DeprecationWarning, match=message) as told:
        found = getattr(cache, name)
    assert told[0].filename == __file__
    expected = {"reader": cache._reader, "static": None, "check_thread": cache._check_thread}
    assert found == expected[name]
