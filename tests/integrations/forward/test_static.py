"""Decoding into buffers of a fixed size, compiled or not, against decoding into growing ones."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from transformers import CompileConfig, MaxLengthCriteria, PreTrainedModel, StoppingCriteriaList

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import OffloadedStorage, PolicyCache, QuantizedStorage
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.state.packed import Packed
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import TOVA, SnapKV
from tests.integrations.model.test_families import SUPPORTED, UNSEEN, model_of, suited
from tests.integrations.support.reading import Interrupted
from tests.integrations.test_generation import assert_same_state
from tests.integrations.test_robustness import POLICIES, batch_of, continued
from tests.reference import tiny_model

ROOM = 12
SNAPKV = SnapKV(retention_tokens=16)


class Counting:
    """A backend that runs graphs as they are, and counts."""

    def __init__(self) -> None:
        self.graphs = 0
        self.calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Counting":
        return self  # a configuration of `generate` is copied

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


def everywhere(backend: Any) -> CompileConfig:
    """As `generate` compiles on a GPU."""
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return config


@pytest.fixture
def backend() -> Any:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def generate(model: Any, cache: Any, given: dict[str, Tensor], **kwargs: Any) -> Any:
    how = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(cache=cache, **given, **{**how, "output_logits": True} | kwargs)


def assert_same(one: Any, other: Any) -> None:
    assert torch.equal(one.sequences, other.sequences)
    for logits, twin in zip(one.logits, other.logits, strict=True):
        assert torch.allclose(logits, twin, atol=1e-4)


def compare(model: PreTrainedModel, policy: CachePolicy, **how: Any) -> PolicyCache:
    """Two turns of a padded batch, into growing buffers and into fixed ones."""
    grows, fixed = PolicyCache(policy), PolicyCache(policy, max_new_tokens=ROOM)
    given = batch_of(60, 35)
    for _ in range(2):
        want, got = generate(model, grows, given), generate(model, fixed, given, **how)
        assert_same(want, got)
        assert_same_state(grows, fixed)
        assert grows.seen_lengths == fixed.seen_lengths
        given = continued(want.sequences, given["attention_mask"], 20, 9)
    return fixed


@pytest.mark.parametrize("name", POLICIES)
def test_the_answer_is_that_of_growing_buffers(model: PreTrainedModel, name: str) -> None:
    cache = compare(model, POLICIES[name])
    for layer in cache.layers:
        # What fixed buffers have padded is packed when the answer is done, without room for more.
        room = 0 if isinstance(layer.held, Packed) else ROOM - 7
        assert layer.capacity == layer.kept_len + room


@pytest.mark.parametrize("name", ["snapkv", "fastkv", "gemfilter", "adakv"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_generate_compiles_what_is_decoded_and_nothing_else(
    backend: Counting, name: str, implementation: str
) -> None:
    model = tiny_model("llama", seed=1, attn_implementation=implementation)
    compare(model, POLICIES[name], compile_config=everywhere(backend))
    assert backend.calls == 2 * 7  # the prompts, which come first, are not


@pytest.mark.parametrize("family", ["mistral_sliding", "gemma3", "gpt_oss", "qwen3_moe"])
def test_compiled_families(backend: Counting, family: str) -> None:
    """More tokens than the sliding window is long."""
    model = model_of(family)
    how: dict[str, Any] = {"max_new_tokens": 24}
    given, policy = batch_of(50, 34), suited("snapkv", model)
    want = generate(model, PolicyCache(policy), given, **how)
    cache = PolicyCache(policy, max_new_tokens=24)
    got = generate(model, cache, given, **how, compile_config=everywhere(backend))
    assert_same(want, got)
    assert backend.calls == 23


@pytest.mark.parametrize("family", SUPPORTED)
def test_families(family: str) -> None:
    model = model_of(family)
    sees_all = None in ModelParts(model).windows
    drops = ["fastkv"] if sees_all else []
    # Where no query is seen, a policy that asks for none.
    for name in ("keydiff",) if family in UNSEEN else ("adakv", *drops):
        policy, given = suited(name, model), batch_of(50, 34)
        want = generate(model, PolicyCache(policy), given, max_new_tokens=20)
        got = generate(model, PolicyCache(policy, max_new_tokens=20), given, max_new_tokens=20)
        assert_same(want, got)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
def test_inductor(model: PreTrainedModel) -> None:
    """The compiler that is used in earnest."""
    torch._dynamo.reset()
    compare(model, POLICIES["fastkv"], compile_config=everywhere("inductor"))
    torch._dynamo.reset()


def test_what_was_compiled_with_one_cache_serves_another(
    model: PreTrainedModel, backend: Counting
) -> None:
    how = {"compile_config": everywhere(backend)}
    caches = [PolicyCache(SNAPKV, max_new_tokens=ROOM) for _ in range(3)]
    prompts = [batch_of(50, 50, seed=seed) for seed in range(3)]
    graphs = []
    for cache, given in zip(caches, prompts, strict=True):
        got = generate(model, cache, given, **how)
        assert_same(generate(model, PolicyCache(SNAPKV), given), got)
        graphs.append(backend.graphs)
    assert graphs == [graphs[0]] * 3
    lengths = [cache.get_seq_length() for cache in caches]
    assert lengths == [57, 57, 57]
    buffers = [weakref.ref(cache.layers[0].held.keys) for cache in caches]
    del caches, cache, got
    gc.collect()
    assert [each() for each in buffers] == [None] * 3  # nor does what was compiled keep them


def test_a_model_compiled_for_another_cache_first(
    model: PreTrainedModel, backend: Counting
) -> None:
    """A graph that knows nothing of policies is not taken for one that does."""
    given, how = batch_of(50), {"compile_config": everywhere(backend)}
    own = {CACHE: None, "cache_implementation": "static"}
    plain = model.generate(**given, **own, max_new_tokens=8, do_sample=False, **how)
    assert backend.calls == 7
    got = generate(model, PolicyCache(SNAPKV, max_new_tokens=ROOM), given, **how)
    assert backend.calls == 14
    assert_same(generate(model, PolicyCache(SNAPKV), given), got)
    again = model.generate(**given, **own, max_new_tokens=8, do_sample=False, **how)
    assert torch.equal(plain, again)


def test_generation_on_no_other_kind_is_compiled(model: PreTrainedModel, backend: Counting) -> None:
    given = batch_of(50)
    for cache, how in (
        (PolicyCache(SNAPKV), {}),
        (PolicyCache(SNAPKV, OffloadedStorage(), max_new_tokens=ROOM), {}),
        (PolicyCache(SNAPKV, max_new_tokens=ROOM), {"num_beams": 2}),
        (PolicyCache(SNAPKV, max_new_tokens=ROOM), {"prefill_chunk_size": 20}),
        (PolicyCache(SNAPKV, max_new_tokens=ROOM), {"prompt_lookup_num_tokens": 2}),
    ):
        want = generate(model, PolicyCache(SNAPKV), given, **how)
        got = generate(model, cache, given, **how, compile_config=everywhere(backend))
        assert_same(want, got)
        assert backend.calls == 0
    assert PolicyCache(SNAPKV, max_new_tokens=ROOM).is_compileable
    assert not PolicyCache(SNAPKV).is_compileable


def test_attentions_are_as_wide_as_what_is_held() -> None:
    model = tiny_model("llama", seed=1, attn_implementation="eager")
    cache = PolicyCache(SNAPKV, max_new_tokens=ROOM)
    with pytest.warns(UserWarning, match="output_attentions keeps generate from decoding into the"):
        got = generate(model, cache, batch_of(50), output_attentions=True)
    widths = [[each.shape[-1] for each in step] for step in got.attentions[1:]]
    assert widths == [[17 + step] * 4 for step in range(7)]


def test_quantised_storage_decodes_as_without_room(model: PreTrainedModel) -> None:
    storage = QuantizedStorage(q_group_size=8)
    want = generate(model, PolicyCache(SNAPKV, storage), batch_of(50))
    got = generate(model, PolicyCache(SNAPKV, storage, max_new_tokens=ROOM), batch_of(50))
    assert_same(want, got)


def test_sampling(model: PreTrainedModel) -> None:
    def sampled(cache: PolicyCache) -> Any:
        torch.manual_seed(3)
        return generate(model, cache, batch_of(50), do_sample=True, num_return_sequences=3)

    assert_same(sampled(PolicyCache(SNAPKV)), sampled(PolicyCache(SNAPKV, max_new_tokens=ROOM)))


def test_a_longer_answer_gets_more_room(model: PreTrainedModel, backend: Counting) -> None:
    given, want = batch_of(60, 35), None
    lengths: list[dict[str, Any]] = [
        {"max_new_tokens": 9},
        {"max_new_tokens": None, "max_length": 69},
    ]
    for how in (*lengths, {**lengths[0], "compile_config": everywhere(backend)}):
        cache = PolicyCache(SNAPKV, max_new_tokens=3)
        got = generate(model, cache, given, **how)
        want = want or generate(model, PolicyCache(SNAPKV), given, **lengths[0])
        assert_same(want, got)
        assert {each.capacity for each in cache.layers} == {16 + 9}
    assert backend.calls == 8


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8"])
def test_bad_room(value: Any) -> None:
    error = ValueError if type(value) is int else TypeError
    with pytest.raises(error, match="max_new_tokens must be"):
        PolicyCache(SNAPKV, max_new_tokens=value)


def test_a_streamer_sees_the_cache_as_it_is(model: PreTrainedModel) -> None:
    """In the middle of it: what is held, its positions, a copy, and a file of it."""
    cache = PolicyCache(SNAPKV, max_new_tokens=ROOM)
    seen: list[tuple[int, int, int]] = []

    class Watching:
        def put(self, value: Tensor) -> None:
            if cache.get_seq_length():
                layer = cache.layers[2]
                last = int(layer.positions[0, 0, -1])
                seen.append((cache.get_seq_length(), layer.keys.shape[2], last))

        def end(self) -> None:
            pass

    generate(model, cache, batch_of(50), streamer=Watching())
    assert [(length, last) for length, _, last in seen[1:]] == [(n, n - 1) for n in range(51, 58)]
    assert [kept for _, kept, _ in seen] == list(range(16, 24))


@pytest.mark.parametrize(
    ("every", "criteria", "compiled"),
    [
        (None, "none", True),
        (None, "by name", False),
        (1, "none", False),
        (1, "by position", False),
        (3, "none", False),
    ],
)
def test_the_ids_of_an_interrupted_answer_are_known(
    model: PreTrainedModel, backend: Counting, every: int | None, criteria: str, compiled: bool
) -> None:
    """Also those of a copy that is made in the middle of the answer."""
    decoding = None if every is None else (SNAPKV if every > 1 else TOVA()).decoding_rule(20, every)
    policy = CachePolicy(SNAPKV.scorer, SNAPKV.selector, SNAPKV.propagation, decoding=decoding)
    cache, given = PolicyCache(policy, max_new_tokens=ROOM), batch_of(60, 35)
    whole = generate(model, PolicyCache(policy), given).sequences
    copies: list[PolicyCache] = []

    class Stopping:
        def put(self, value: Tensor) -> None:
            if cache.get_seq_length() == 64:
                copies.append(copy.copy(cache))
                raise Interrupted

        def end(self) -> None:
            pass

    own = StoppingCriteriaList([MaxLengthCriteria(99)])
    how: dict[str, Any] = {"streamer": Stopping()}
    how |= {"compile_config": everywhere(backend)} if compiled else {}
    how |= {"stopping_criteria": own} if criteria == "by name" else {}
    before = (given["inputs"], None, None, own) if criteria == "by position" else ()
    rest = {name: each for name, each in given.items() if name != "inputs" or not before}
    with pytest.raises(Interrupted):
        model.generate(*before, cache=cache, max_new_tokens=8, do_sample=False, **rest, **how)
    assert len(own) == 1
    assert bool(backend.calls) is compiled
    for each in (cache, *copies):
        ids = each._reader.tokens.ids
        assert ids.shape[1] >= 63
        assert torch.equal(ids, whole[:, : ids.shape[1]])
