"""What a cache leaves behind: on its model, and in memory."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import TOVA, FullContext, GemFilter, SnapKV
from tests.integrations.support.reading import Interrupted, marks_on
from tests.integrations.test_robustness import POLICIES, batch_of, failing, generate
from tests.reference import tiny_model


@contextmanager
def no_collection() -> Iterator[None]:
    """Only what no reference holds is freed: a cycle would stay."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_cache_that_is_never_used_leaves_nothing_behind(model: PreTrainedModel) -> None:
    before = marks_on(model)
    with no_collection():
        cache = PolicyCache(POLICIES["fastkv"])
        dead = weakref.ref(cache)
        del cache
        assert dead() is None
        cache = PolicyCache(POLICIES["fastkv"])
        dead = weakref.ref(cache)
        with cache.attached(model):
            assert marks_on(model) != before
        del cache
        assert dead() is None
    assert marks_on(model) == before


def only_attach(model: PreTrainedModel, cache: PolicyCache) -> None:
    with cache.attached(model):
        pass


def read_by_hand(model: PreTrainedModel, cache: PolicyCache) -> None:
    with cache.attached(model):
        model(batch_of(30)["inputs"], cache=cache)


def read_and_generate(model: PreTrainedModel, cache: PolicyCache, **how: Any) -> None:
    generate(model, cache, batch_of(30), **how)


def fail_and_leave(model: PreTrainedModel, cache: PolicyCache) -> None:
    with failing(model, "layers.2.mlp", 1, Interrupted), pytest.raises(Interrupted):
        generate(model, cache, batch_of(30))


def be_refused(model: PreTrainedModel, cache: PolicyCache) -> None:
    with pytest.raises(ValueError, match="not_an_argument"):
        generate(model, cache, batch_of(30), not_an_argument=1)


def decode_into_fixed_buffers(model: PreTrainedModel, cache: PolicyCache) -> None:
    cache.max_new_tokens = 5
    read_and_generate(model, cache)
    assert all(layer.capacity > layer.kept_len for layer in cache.layers)


USES: dict[str, Callable[[PreTrainedModel, PolicyCache], None]] = {
    "attached": only_attach,
    "by hand": read_by_hand,
    "generate": read_and_generate,
    "drafts": lambda model, cache: read_and_generate(model, cache, prompt_lookup_num_tokens=2),
    "beams": lambda model, cache: read_and_generate(model, cache, num_beams=2),
    "failure": fail_and_leave,
    "fixed": decode_into_fixed_buffers,
    "refusal": be_refused,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["snapkv", "fastkv", "gemfilter"])
def test_neither_keeps_the_other_alive(name: str, use: str) -> None:
    """Without the collector: a cache does not keep its model, nor a model its caches."""
    for survivor in ("cache", "model"):
        model, cache = tiny_model("llama", seed=1), PolicyCache(POLICIES[name])
        with no_collection():
            USES[use](model, cache)
            decoder, layer = weakref.ref(model.model), weakref.ref(model.model.layers[0])
            held = weakref.ref(cache)
            if survivor == "cache":
                del model
                assert decoder() is None
                assert layer() is None
            else:
                del cache
                assert held() is None


def living() -> tuple[int, int]:
    """Tensors and all objects that the collector knows."""
    objects = gc.get_objects()
    return sum(issubclass(type(each), Tensor) for each in objects), len(objects)


def test_many_generations_leave_no_tensor_behind() -> None:
    """320 of them, without the collector: not one tensor, and few objects."""
    model = tiny_model("llama", seed=1, num_layers=2, query_heads=2, kv_heads=1, hidden_size=16)
    given, kept = batch_of(20), []

    def run(keeps: bool = False) -> None:
        for policy in ("snapkv", "fastkv", "gemfilter"):
            cache = PolicyCache(GemFilter() if policy == "gemfilter" else POLICIES[policy])
            generate(model, cache, given, max_new_tokens=2)
            kept.extend([cache] * keeps)
        for how in ({"prefill_chunk_size": 8}, {"prompt_lookup_num_tokens": 2}):
            generate(model, PolicyCache(POLICIES["snapkv"]), given, max_new_tokens=2, **how)
        fixed = PolicyCache(POLICIES["fastkv"], max_new_tokens=2)
        generate(model, fixed, given, max_new_tokens=2)
        for method in (TOVA(), SnapKV()):  # whose buffers are told of queries
            bounded = FullContext(decoding=method.decoding_rule(48, every=method.every))
            fixed = PolicyCache(bounded, max_new_tokens=4)
            generate(model, fixed, given, max_new_tokens=4)

    run()
    with no_collection():
        tensors, objects = living()
        for _ in range(40):
            run()
        after = living()
        assert after[0] == tensors
        assert (
            after[1] - objects < 5 * 320
        )  # Transformers itself leaves a few, which the collector finds
        run(keeps=True)
        assert living()[0] > tensors  # a cache that is kept is noticed
