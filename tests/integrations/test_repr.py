"""What caches and documents print of themselves, and the members of a cache that users have."""

import copy
import inspect

import pytest
from transformers import Cache

from kvpolicy.integrations.transformers import PolicyCache, ReadDocument
from kvpolicy.policies import CLAA, AdaKV, FullContext, SnapKV
from tests.integrations.hybrids.models import hybrid
from tests.integrations.lm_eval.support import char_tokenizer
from tests.integrations.support.conversation import prompt
from tests.integrations.support.reading import read
from tests.reference import tiny_model


def test_a_cache_shows_its_policy_and_what_it_holds() -> None:
    model = tiny_model("llama", seed=0)
    cache = PolicyCache(SnapKV(retention_rate=0.1))
    assert repr(cache) == "PolicyCache(SnapKV(retention_rate=0.1)): empty"
    model.generate(prompt(100), cache=cache, max_new_tokens=4, do_sample=False)
    written = "PolicyCache(SnapKV(retention_rate=0.1)): 103 tokens read, 13 held by each layer"
    assert repr(cache) == str(cache) == written
    assert repr(copy.copy(cache)) == written
    cache.reset()
    assert repr(cache) == "PolicyCache(SnapKV(retention_rate=0.1)): empty"


def test_layers_that_hold_unlike_numbers_are_a_range() -> None:
    model = tiny_model("llama", seed=0)
    policy = CLAA(tsp_layer=1, retention_rate=0.2, tsp_rate=0.5, whole_layers=1)
    cache, _ = read(model, policy, prompt(40))
    assert {layer.kept_len for layer in cache.layers} == {8, 40}
    assert repr(cache).endswith("): 40 tokens read, 8 to 40 held by each layer")


def test_long_numbers_are_grouped() -> None:
    model = tiny_model("llama", seed=0)
    whole, logits = read(model, FullContext(), prompt(1200))
    assert logits.isfinite().all()
    assert repr(whole) == "PolicyCache(FullContext()): 1,200 tokens read, 1,200 held by each layer"


@pytest.mark.parametrize(
    "cache",
    [
        PolicyCache(SnapKV(retention_tokens=9), max_new_tokens=8),
        PolicyCache(SnapKV(decoding=12)),
        PolicyCache(AdaKV(0.3)),
    ],
    ids=repr,
)
def test_other_kinds_of_caches(cache: PolicyCache) -> None:
    model = tiny_model("llama", seed=0)
    model.generate(prompt(40), cache=cache, max_new_tokens=4, do_sample=False)
    lengths = {layer.kept_len for layer in cache.layers}
    held = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
    assert repr(cache).endswith(f": 43 tokens read, {held} held by each layer")
    assert str(cache.policy) in repr(cache)


def test_layers_without_tokens_are_not_counted() -> None:
    model = hybrid("qwen3_next")
    cache, _ = read(model, SnapKV(retention_tokens=9, window_size=2), prompt(40))
    assert repr(cache).endswith("): 40 tokens read, 9 held by each layer")


def test_a_document_shows_its_model() -> None:
    model = tiny_model("llama", seed=1)
    text = "the rain wrote it, and it costs a little. " * 2
    document = ReadDocument(model, char_tokenizer(), text, SnapKV(retention_tokens=12))
    count, name = document.cache.get_seq_length(), type(model).__name__
    assert count > 40
    written = f"SnapKV(retention_tokens=12)): {count} tokens read, 12 held by each layer"
    assert repr(document) == f"ReadDocument({name}, {written}"


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
