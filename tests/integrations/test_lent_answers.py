"""Answers of `generate` in layers of Transformers, against the same answers with hooks."""

import copy
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvpolicy import CachePolicy
from kvpolicy.errors import CacheInUseError
from kvpolicy.integrations.transformers import (
    OffloadedStorage,
    PolicyCache,
    QuantizedStorage,
    Storage,
)
from kvpolicy.integrations.transformers.forward import lent_answer
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import (
    AdaKV,
    FastKV,
    FullContext,
    GemFilter,
    PyramidInfer,
    SnapKV,
    StreamingLLM,
)
from tests.families import FAMILIES, VOCAB_SIZE
from tests.integrations.support.conversation import left_padded
from tests.reference import tiny_model

POLICIES = {
    "full_context": FullContext(),
    "streamingllm": StreamingLLM(0.3),
    "snapkv": SnapKV(retention_tokens=12),
    "fastkv": FastKV(tsp_layer=1, tsp_rate=0.4, retention_tokens=12),
    "adakv": AdaKV(retention_tokens=12),
    "gemfilter": GemFilter(filter_layer=1, retention_tokens=12),
    "gapless": attrs.evolve(StreamingLLM(0.3), gapless=True),
}
# The families whose tokens need nothing of the library under any of the policies above.
FREE = {
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "phi3", "granite"),
    *("olmo2", "cohere", "glm4", "starcoder2", "gpt_neox", "deepseek_v3", "smollm3", "stablelm"),
    *("minimax_m2", "opt"),
}
REFUSED = {"falcon_alibi", "mamba", "bloom", "mpt"}


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether hooks were found to be needed, once an answer."""
    found: list[bool] = []
    needs_no_hooks = lent_answer.needs_no_hooks

    def noted(*args: Any) -> bool:
        found.append(needs_no_hooks(*args))
        return found[-1]

    monkeypatch.setattr(lent_answer, "needs_no_hooks", noted)
    return found


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama", seed=1)


def random_tokens(batch: int, length: int, *, seed: int) -> Tensor:
    """Draw token ids ``[batch, length]``, none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE, (batch, length), generator=generator)


def answer(
    model: PreTrainedModel,
    prompt: Tensor,
    cache: PolicyCache,
    count: int = 9,
    *,
    mask: Tensor | None = None,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """Return the tokens of a greedy answer, and their logits ``[count, batch, vocab]``."""
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt) if mask is None else mask,
        cache=cache,
        max_new_tokens=count,
        output_logits=True,
        return_dict_in_generate=True,
        **{"do_sample": False, **how},
    )
    return output.sequences, torch.stack(output.logits)


@contextmanager
def with_hooks(hooked: bool = True) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if hooked:
            patch.setattr(lent_answer, "needs_no_hooks", lambda *args: False)
        yield


def assert_alike(one: PolicyCache, other: PolicyCache) -> None:
    """Both caches have seen and hold the same."""
    assert one.seen_lengths == other.seen_lengths
    assert one.get_seq_length() == other.get_seq_length()
    assert torch.equal(one._reader.tokens.ids, other._reader.tokens.ids)
    assert torch.equal(one._reader.tokens.appended, other._reader.tokens.appended)
    for own, theirs in zip(one.layers, other.layers, strict=True):
        assert torch.equal(own.positions, theirs.positions)
        torch.testing.assert_close(own.keys, theirs.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own.values, theirs.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_every_family_with_and_without_hooks(name: str, begun: list[bool]) -> None:
    model = FAMILIES[name].build(seed=1)
    prompt = random_tokens(1, 40, seed=2)
    policy = StreamingLLM(0.5)
    cache = PolicyCache(policy)
    tokens, logits = answer(model, prompt, cache)
    with with_hooks():
        expected = PolicyCache(policy)
        same, same_logits = answer(model, prompt, expected)
    assert torch.equal(tokens, same)
    torch.testing.assert_close(logits, same_logits, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == expected.get_seq_length() == 48
    if name in FREE:
        assert begun == [True]


def test_padded_rows_keep_hooks(llama: PreTrainedModel, begun: list[bool]) -> None:
    rows = [random_tokens(1, count, seed=count)[0].tolist() for count in (40, 31)]
    prompt, mask = left_padded(rows)
    answer(llama, prompt, PolicyCache(SnapKV(retention_tokens=12)), mask=mask)
    assert begun == [False]


@pytest.mark.parametrize("held", [OffloadedStorage(), QuantizedStorage(q_group_size=8)], ids=str)
def test_storages(llama: PreTrainedModel, held: Storage, begun: list[bool]) -> None:
    prompt, policy = random_tokens(1, 40, seed=2), SnapKV(retention_tokens=12)
    tokens, _ = answer(llama, prompt, PolicyCache(policy, held))
    with with_hooks():
        expected, _ = answer(llama, prompt, PolicyCache(policy, held))
    assert torch.equal(tokens, expected)
    assert begun[0] is isinstance(held, OffloadedStorage)


@pytest.mark.parametrize(("window", "free"), [(49, True), (48, False)])
def test_a_window_that_the_answer_does_not_reach(
    window: int, free: bool, begun: list[bool]
) -> None:
    model = FAMILIES["mistral"].build(seed=1)
    model.config.sliding_window = window
    prompt = random_tokens(1, 40, seed=2)
    cache = PolicyCache(FullContext())
    tokens, logits = answer(model, prompt, cache)
    assert begun == [free]
    whole = model(tokens[:, :-1], use_cache=False).logits[0, 39:]
    torch.testing.assert_close(logits[:, 0], whole, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
@pytest.mark.parametrize(("window", "free"), [(61, True), (45, False)])
@pytest.mark.parametrize("read", [0, 20], ids=["default length", "length of new ids"])
def test_a_window_and_an_answer_without_max_new_tokens(
    window: int, free: bool, read: int, begun: list[bool]
) -> None:
    model = FAMILIES["mistral"].build(seed=1)
    model.config.sliding_window = window
    prompt, outputs = random_tokens(1, 40, seed=2), []
    how: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}
    how |= {"max_length": 40} if read else {}  # Transformers counts the ids that it is given
    for hooked in (False, True):
        cache = PolicyCache(StreamingLLM(0.5))
        if read:
            answer(model, prompt[:, :read], cache, 1)
        with with_hooks(hooked):
            mask = torch.ones_like(prompt)
            inputs = {"attention_mask": mask, CACHE: cache, "output_logits": True}
            outputs.append(model.generate(prompt[:, read:], **inputs, **how))
    assert begun == [free]
    (logits, expected) = (torch.stack(each.logits) for each in outputs)
    assert len(logits) == 20
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


class Reader:
    """A streamer that looks at a cache after each token."""

    def __init__(self, cache: PolicyCache) -> None:
        self.cache, self.seen, self.copies = cache, [], []

    def put(self, ids: Tensor) -> None:
        cache = self.cache
        if not cache.get_seq_length():
            return
        layer = cache.layers[2]
        assert layer.positions.shape[2] == layer.keys.shape[2] == layer.kept_len
        assert int(layer.positions.max()) == cache.get_seq_length() - 1
        assert cache.report().layers[0].seen == cache.seen_lengths[0]
        self.seen.append(cache.seen_lengths[0])
        self.copies.append(copy.copy(cache))

    def end(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("policy", [POLICIES["snapkv"], POLICIES["adakv"]])
def test_a_cache_that_is_read_and_copied_between_tokens(
    llama: PreTrainedModel, policy: CachePolicy, begun: list[bool]
) -> None:
    prompt, cache = random_tokens(1, 40, seed=2), PolicyCache(policy)
    reader = Reader(cache)
    tokens, _ = answer(llama, prompt, cache, streamer=reader)
    assert all(begun)
    assert reader.seen == [*range(40, 48), 48]
    alone = PolicyCache(policy)
    expected, logits = answer(llama, prompt, alone)
    assert torch.equal(tokens, expected)
    assert_alike(cache, alone)
    for index, each in enumerate(reader.copies[:-1]):  # each goes on where it was copied
        assert each.get_seq_length() == 40 + index
        assert torch.equal(each._reader.tokens.ids, tokens[:, : 40 + index])
        with each.attached(llama), torch.no_grad():
            again = llama(tokens[:, 40 + index][:, None], cache=each).logits[:, -1]
        torch.testing.assert_close(again, logits[index + 1], atol=1e-5, rtol=1e-5)


def test_other_threads_do_not_read_a_cache_that_is_written(llama: PreTrainedModel) -> None:
    prompt, cache = random_tokens(1, 40, seed=2), PolicyCache(SnapKV(retention_tokens=12))
    reads = [lambda: copy.copy(cache), lambda: cache.seen_lengths, lambda: cache.layers[0].keys]
    errors: list[type] = []

    class Threads(Reader):
        def put(self, ids: Tensor) -> None:
            for read in reads if cache.get_seq_length() > 41 else ():
                errors.append(type(pool.submit(read).exception()))

    with ThreadPoolExecutor(1) as pool:
        tokens, _ = answer(llama, prompt, cache, streamer=Threads(cache))
        assert errors == [CacheInUseError] * 7 * len(reads)
        assert pool.submit(reads[0]).result().get_seq_length() == 48
    assert torch.equal(tokens, answer(llama, prompt, PolicyCache(cache.policy))[0])


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("policy", [POLICIES["snapkv"], POLICIES["adakv"]])
def test_an_interrupted_token_is_forgotten(
    llama: PreTrainedModel, layer: int, policy: CachePolicy, begun: list[bool]
) -> None:
    prompt = random_tokens(1, 40, seed=2)
    tokens, logits = answer(llama, prompt, PolicyCache(policy), 14)
    cache, calls = PolicyCache(policy), []

    def interrupts(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 6:  # in the fifth token
            raise KeyboardInterrupt

    handle = llama.model.layers[layer].mlp.register_forward_hook(interrupts)
    with pytest.raises(KeyboardInterrupt):
        answer(llama, prompt, cache)
    handle.remove()
    assert begun[0]
    assert begun[-1]
    assert cache.get_seq_length() == 44
    assert torch.equal(cache._reader.tokens.ids, tokens[:, :44])
    if policy is POLICIES["snapkv"]:
        assert all(each.kept_len == 12 + 4 for each in cache.layers)
    with cache.attached(llama), torch.no_grad():
        for step in range(44, 53):
            again = llama(tokens[:, step : step + 1], cache=cache).logits[:, -1]
            torch.testing.assert_close(again, logits[step - 39], atol=1e-5, rtol=1e-5)


class Counting(Reader):
    """A streamer that counts the calls of the library's functions between two tokens."""

    def __init__(self, cache: PolicyCache) -> None:
        super().__init__(cache)
        self.calls: list[Counter[str]] = []
        self.kinds: list[type] = []

    def put(self, ids: Tensor) -> None:
        sys.setprofile(None)
        lent = self.cache._reader.answer.cache
        if lent is not None:
            self.kinds += [type(layer) for layer in lent.layers]
        self.calls.append(Counter())
        sys.setprofile(self._note)

    def end(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        where = frame.f_code.co_filename
        if (
            event == "call"
            and "integrations/transformers/" in where
            and "site-packages" not in where
        ):
            self.calls[-1][frame.f_code.co_name] += 1


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_token_runs_in_layers_of_transformers(name: str) -> None:
    """In a forward, the library only tells lengths."""
    model, cache = FAMILIES[name].build(seed=1), PolicyCache(SnapKV(retention_tokens=12))
    watch = Counting(cache)
    answer(model, random_tokens(1, 40, seed=2), cache, streamer=watch)
    assert watch.kinds
    for kind in watch.kinds:
        assert issubclass(kind, DynamicLayer)
        assert kind.update is DynamicLayer.update
    of_token = watch.calls[4]
    told = {"get_seq_length", "seen_by", "seen_since", "length", "get_query_offset"}
    noted = {"__call__", "note_ids", "_of", "seen", "lend", "mask_sizes", "get_mask_sizes"}
    assert set(of_token) <= told | noted | {"is_compileable", "given_cache", "__getattr__"}
    assert of_token["get_seq_length"] + of_token["get_mask_sizes"] <= 3
    assert watch.calls[4] == watch.calls[6]


def test_bytes_are_those_of_the_tokens_held(llama: PreTrainedModel) -> None:
    """Also where somebody looks at each token."""
    cache, found = PolicyCache(SnapKV(retention_tokens=12)), []

    class Looking(Reader):
        def put(self, ids: Tensor) -> None:
            if cache.get_seq_length():
                lent = cache._reader.answer.cache
                if lent is not None:
                    assert all(layer.contents.held is None for layer in cache.layers)
                    found.append(lent.layers[1].keys.untyped_storage().nbytes())
                layer = cache.layers[1]
                assert layer.nbytes() <= layer.kept_len * 17 / 16 * width + 16 * width

    width = 2 * 4 * llama.config.num_key_value_heads * llama.model.layers[0].self_attn.head_dim
    answer(llama, random_tokens(1, 40, seed=2), cache, 20, streamer=Looking(cache))
    assert found[1:] == [width // 2 * (12 + count) for count in range(2, 2 + len(found) - 1)]


def test_two_caches_attached_at_once(llama: PreTrainedModel, begun: list[bool]) -> None:
    prompt, policy = random_tokens(1, 40, seed=2), SnapKV(retention_tokens=12)
    expected, _ = answer(llama, prompt, PolicyCache(policy))
    one, other = PolicyCache(policy), PolicyCache(PyramidInfer())
    with other.attached(llama), one.attached(llama):
        assert torch.equal(answer(llama, prompt, one)[0], expected)
        answer(llama, prompt, other)
        more = random_tokens(1, 7, seed=4)
        one.start_turn()
        with torch.no_grad():
            llama(more, cache=one)
    assert begun == [True, True, True]
    assert one.get_seq_length() == 48 + 7
    assert not any(module._forward_pre_hooks for module in llama.modules())


def test_an_answer_leaves_no_cycle(llama: PreTrainedModel) -> None:
    import weakref

    cache = PolicyCache(SnapKV(retention_tokens=12))
    answer(llama, random_tokens(1, 40, seed=2), cache)
    gc.collect()
    gc.disable()
    try:
        held = weakref.ref(cache)
        del cache
        assert held() is None
    finally:
        gc.enable()
