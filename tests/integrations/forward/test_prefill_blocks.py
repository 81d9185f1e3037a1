"""Prompts read in blocks, each of which is chosen from as a turn is."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache, read_together
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import (
    H2O,
    FastKV,
    FullContext,
    GemFilter,
    KeyDiff,
    KVzip,
    ReplayKV,
    SnapKV,
    StreamingLLM,
)
from tests.families import FAMILIES as BUILDS
from tests.integrations.support.conversation import left_padded
from tests.integrations.support.reading import assert_same_positions, read
from tests.integrations.vision.models import FAMILIES as VISION
from tests.integrations.vision.prompts import model_inputs
from tests.integrations.vision.rows import first_parts
from tests.integrations.vision.rows import model_of as vision_model
from tests.reference import tiny_model

BLOCK = 16
POLICIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "snapkv": (SnapKV, {"retention_rate": 0.4, "window_size": 4}),
    "snapkv_tokens": (SnapKV, {"retention_tokens": 20, "window_size": 4}),
    "h2o": (H2O, {"retention_rate": 0.4}),
    "keydiff": (KeyDiff, {"retention_tokens": 12}),
    "fastkv": (FastKV, {"retention_rate": 0.3, "tsp_rate": 0.5, "tsp_layer": 1, "window_size": 4}),
    "replaykv": (ReplayKV, {"retention_rate": 0.4}),
    "gapless": (StreamingLLM, {"retention_tokens": 12, "gapless": True}),
    "bounded": (H2O, {"retention_tokens": 12, "decoding": 12}),
}


def prompt_of(length: int, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 90, (1, length), generator=generator)


@torch.no_grad()
def in_turns(
    model: Any, policy: CachePolicy, ids: Tensor, sizes: list[int]
) -> tuple[PolicyCache, Tensor]:
    """Read a prompt in turns of the given sizes."""
    cache, logits = PolicyCache(policy), []
    with cache.attached(model):
        for piece in ids.split(sizes, dim=1):
            cache.start_turn()
            logits.append(model(piece, **{CACHE: cache}).logits)
    return cache, torch.cat(logits, dim=1)


def positions(cache: PolicyCache) -> list[Tensor]:
    return [layer.positions for layer in cache.layers]


@pytest.mark.parametrize("name", POLICIES)
def test_a_block_is_a_turn(name: str) -> None:
    kind, given = POLICIES[name]
    model, ids = tiny_model("llama", seed=3), prompt_of(57)
    cache, logits = read(model, kind(**given, prefill_block=BLOCK), ids)
    # Counted from the end: 9 and three times 16.
    other, expected = in_turns(model, kind(**given), ids, [9, BLOCK, BLOCK, BLOCK])
    assert_same_positions(cache, other)
    torch.testing.assert_close(logits, expected)
    whole, _ = read(model, kind(**given), ids)
    # The most recent tokens are the same either way.
    assert name == "gapless" or any(
        a.shape != b.shape or not torch.equal(a, b)
        for a, b in zip(positions(cache), positions(whole), strict=True)
    )


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "qwen3_next", "gpt_oss"])
def test_a_block_is_a_turn_in_layers_of_other_kinds(family: str) -> None:
    """Sliding windows, latent attention, recurrences, attention sinks."""
    model, ids = BUILDS[family].build(3), prompt_of(57)
    kind, given = POLICIES["keydiff"]
    cache, logits = read(model, kind(**given, prefill_block=BLOCK), ids)
    other, expected = in_turns(model, kind(**given), ids, [9, BLOCK, BLOCK, BLOCK])
    assert [each.kept_len for each in cache.layers] == [each.kept_len for each in other.layers]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_images(family: str) -> None:
    """Blocks that keep everything change nothing, wherever they end."""
    model = vision_model(family)
    given = model_inputs(VISION[family], [[first_parts(family)[0]]])
    cache, logits = read(model, FullContext(prefill_block=7), **given)
    other, expected = read(model, FullContext(), **given)
    assert_same_positions(cache, other)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    kinds = [each._reader.now.tokens.kinds for each in (cache, other)]  # type: ignore[union-attr]
    assert kinds[0].equal(kinds[1])


@pytest.mark.parametrize("family", ["gemma3", "paligemma"])
def test_images_whose_tokens_see_each_other_are_refused(family: str) -> None:
    given = model_inputs(VISION[family], [[first_parts(family)[0]]])
    with pytest.raises((UnsupportedGenerationError, UnsupportedModelError), match="block|chunk"):
        read(vision_model(family), FullContext(prefill_block=7), **given)


@pytest.mark.parametrize("name", ["snapkv", "keydiff", "fastkv", "replaykv"])
def test_padded_rows_are_read_as_if_alone(name: str) -> None:
    kind, given = POLICIES[name]
    model, lens = tiny_model("llama", seed=3), (57, 41, 12)
    policy = kind(**given, prefill_block=BLOCK)
    rows = [prompt_of(length, seed) for seed, length in enumerate(lens)]
    ids, mask = left_padded([row[0].tolist() for row in rows])
    cache, logits = read(model, policy, ids, mask)
    for index, row in enumerate(rows):
        alone, expected = read(model, policy, row)
        torch.testing.assert_close(logits[index, -1], expected[0, -1], atol=1e-4, rtol=1e-4)
        for many, one in zip(positions(cache), positions(alone), strict=True):
            own = [head[head >= 0].tolist() for head in many[index]]
            assert own == [head[head >= 0].tolist() for head in one[0]]


@pytest.mark.parametrize("name", ["snapkv", "fastkv", "h2o", "replaykv"])
@pytest.mark.parametrize("size", [5, 16, 24])
def test_chunks_of_the_caller_change_nothing(name: str, size: int) -> None:
    kind, given = POLICIES[name]
    model, ids = tiny_model("llama", seed=3), prompt_of(57)
    policy = kind(**given, prefill_block=BLOCK)
    cache, logits = read(model, policy, ids)
    other, last = PolicyCache(policy), None
    with torch.no_grad(), other.attached(model):
        other.start_turn(prompt_len=57)
        for piece in ids.split(size, dim=1):
            last = model(piece, **{CACHE: other}).logits
    assert_same_positions(cache, other)
    assert last is not None
    torch.testing.assert_close(last[:, -1], logits[:, -1])


@pytest.mark.parametrize("name", POLICIES)
def test_generate(name: str) -> None:
    kind, given = POLICIES[name]
    model, ids = tiny_model("llama", seed=3), prompt_of(57)
    policy = kind(**given, prefill_block=BLOCK)
    cache = PolicyCache(policy)
    answer = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    chunked = model.generate(
        ids,
        past_key_values=PolicyCache(policy),
        max_new_tokens=5,
        do_sample=False,
        prefill_chunk_size=24,
    )
    assert torch.equal(answer, chunked)
    alone, logits = read(model, policy, ids)
    token, expected = logits[:, -1:].argmax(-1), []
    with torch.no_grad(), alone.attached(model):
        for _ in range(5):
            expected.append(int(token))
            token = model(token, **{CACHE: alone}).logits[:, -1:].argmax(-1)
    assert answer[0, 57:].tolist() == expected
    # Another turn, which the conversation is passed to whole.
    more = torch.cat([answer, prompt_of(40, seed=9)], dim=1)
    again = model.generate(
        more, attention_mask=torch.ones_like(more), past_key_values=cache, max_new_tokens=2
    )
    assert again.shape[1] == 57 + 5 + 42


def test_memory_is_bounded_in_prefill() -> None:
    model = tiny_model("llama", seed=3, attn_implementation="eager")
    ids = prompt_of(200)
    seen: list[int] = []

    class Attended(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "softmax" in str(op):
                seen.append(args[0].shape[-1])
            return op(*args, **(kwargs or {}))

    with Attended():
        cache, _ = read(model, KeyDiff(retention_tokens=12, prefill_block=BLOCK), ids)
    assert max(seen) == 12 + BLOCK
    assert {each.shape[2] for each in positions(cache)} == {12}


def test_read_together_reads_blocks_alone() -> None:
    model, ids = tiny_model("llama", seed=3), prompt_of(57)
    policies = {
        "full": FullContext(),
        "whole": SnapKV(0.4, window_size=4),
        "blocks": SnapKV(0.4, window_size=4, prefill_block=BLOCK),
    }
    caches = read_together(model, ids, policies)
    for name, policy in policies.items():
        cache, logits = read(model, policy, ids)
        assert_same_positions(caches[name], cache)
        torch.testing.assert_close(caches.logits[name], logits[:, -1], atol=1e-5, rtol=1e-5)


def test_a_block_that_fails_undoes_the_prompt() -> None:
    model, ids = tiny_model("llama", seed=3), prompt_of(57)
    policy = SnapKV(0.4, window_size=4, prefill_block=BLOCK)
    cache = PolicyCache(policy)
    layer, calls = model.model.layers[1].mlp, []

    def fails(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("in the third block")

    handle = layer.register_forward_pre_hook(fails)
    for decoder in (model, model.model):
        calls.clear()
        with (
            torch.no_grad(),
            cache.attached(model),
            pytest.raises(RuntimeError, match="third block"),
        ):
            decoder(ids, **{CACHE: cache})
        assert cache.seen_lengths == ()
        assert not any(layer.is_initialized for layer in cache.layers)
    handle.remove()
    with torch.no_grad(), cache.attached(model):
        model(ids, **{CACHE: cache})
    assert_same_positions(cache, read(model, policy, ids)[0])


def test_what_is_refused() -> None:
    for method, why in ((KVzip(), "second reading"), (GemFilter(), "restart")):
        parts = (method.scorer, method.selector, method.propagation)
        with pytest.raises(ValueError, match=f"prefill_block must be None with a {why}"):
            CachePolicy(*parts, rereading=method.rereading, prefill_block=64)
    with pytest.raises(ValueError, match="prefill_block must be"):
        SnapKV(prefill_block=0)
    with pytest.raises(TypeError, match="prefill_block must be"):
        SnapKV(prefill_block=1.5)  # type: ignore[arg-type]
    assert "prefill_block=64" in str(SnapKV(prefill_block=64))
