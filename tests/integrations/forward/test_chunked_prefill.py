"""Prompts in chunks, whatever the policy: what the prompt read at once gives, and the reference."""

from functools import cache
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvpolicy
from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    FastKV,
    GemFilter,
    GlobalThresholdSelector,
    GQAGroupSelector,
    PyramidInfer,
    ReplayKV,
    RestartPropagation,
    StagedPropagation,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from tests.families import FAMILIES as BUILDS
from tests.integrations.forward.test_history import POLICIES as LOOKING_BACK
from tests.integrations.hybrids.models import hybrid
from tests.integrations.support.conversation import (
    METHODS,
    TOLERANCE,
    USUAL,
    Lengths,
    assert_alike,
    assert_as_reference,
    left_padded,
    run_conversation,
    run_turn,
)
from tests.integrations.test_generation import CHUNKS_GO_ON
from tests.reference import random_tokens, tiny_model

pytestmark = pytest.mark.skipif(
    not CHUNKS_GO_ON, reason="this Transformers cuts masks of chunks wrongly"
)

# A second turn long enough that some of it is dropped.
LONG = Lengths(first=(67, 41, 23), second=(53, 39, 45), num_decode=3)
ALL_ROWS = (0, 1, 2)
DROPPING: dict[str, CachePolicy] = {
    "fastkv": FastKV(tsp_rate=0.4, retention_rate=0.25, window_size=4, kernel_size=3),
    "gemfilter": GemFilter(retention_rate=0.3),
    "pyramidinfer": PyramidInfer(min_context=8),
    "two_stages": METHODS["two_stages"][0],
}


@cache
def model_of(name: str, implementation: str = "sdpa") -> PreTrainedModel:
    if name in ("llama", "qwen3"):
        return tiny_model(name, seed=3, attn_implementation=implementation)
    return BUILDS[name].build(3)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("chunk", [9, 1])
def test_a_padded_batch_against_the_reference(name: str, chunk: int) -> None:
    lengths = LONG if chunk > 1 else USUAL
    model, (policy, method) = model_of("llama"), METHODS[name]
    assert_as_reference(model, policy, method, ALL_ROWS, lengths, prefill_chunk_size=chunk)


def registered_policies() -> dict[str, CachePolicy]:
    return {name: kvpolicy.build(name) for name in kvpolicy.registered("policy")}


@pytest.mark.parametrize("rows", [(0,), ALL_ROWS], ids=["single", "padded"])
@pytest.mark.parametrize("name", sorted(registered_policies()))
def test_every_named_method(name: str, rows: tuple[int, ...]) -> None:
    """With its own defaults, chunks that divide nothing, and one chunk longer than the prompt."""
    assert_as_whole(model_of("qwen3"), registered_policies()[name], rows, (13, 500))


# Layers on both sides of a drop choose together, once the last one has been read.
TOGETHER = {
    "one_drop": ReplayKV(0.3, window_size=4, tsp_rate=0.4, tsp_layer=1),
    "two_drops": CachePolicy(
        WindowMaxPoolScorer(4, kernel_size=3),
        GlobalThresholdSelector(0.25, window_size=4),
        METHODS["two_stages"][0].propagation,
    ),
    "restart": CachePolicy(
        WindowMaxPoolScorer(4, kernel_size=3),
        GlobalThresholdSelector(0.25, window_size=4),
        RestartPropagation(0.4, filter_layer=1, window_size=4),
    ),
}
# Behind windows: drops after layers that see all.
TWO_DROPS = CachePolicy(
    WindowMaxPoolScorer(4, kernel_size=3),
    GQAGroupSelector(0.25, window_size=4),
    StagedPropagation(
        [
            TokenSelectivePropagation(tsp_depth=0.4, tsp_rate=0.7, window_size=4),
            TokenSelectivePropagation(tsp_depth=0.7, tsp_rate=0.35, window_size=4),
        ]
    ),
)
# What earlier layers found salient goes along with the tokens that go on.
CASES: list[tuple[str, CachePolicy]] = [
    *(("llama", policy) for policy, _ in LOOKING_BACK.values()),
    *(("qwen3", policy) for policy in TOGETHER.values()),
    *(("gemma3", policy) for policy in (DROPPING["fastkv"], TWO_DROPS)),
    *(("gpt_oss", policy) for policy in (DROPPING["fastkv"], TWO_DROPS)),
    *(("deepseek_v3", policy) for policy in DROPPING.values()),
    *(("qwen3_moe", policy) for policy in DROPPING.values()),
]


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{family}-{index}" for index, (family, _) in enumerate(CASES)]
)
def test_families_and_parts(case: tuple[str, CachePolicy]) -> None:
    family, policy = case
    assert_as_whole(model_of(family), policy, ALL_ROWS, (11, 500) if family == "qwen3" else (11,))


@pytest.mark.parametrize("name", ["fastkv", "gemfilter"])
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "nemotron_h"])
def test_hybrids(family: str, name: str) -> None:
    assert_as_whole(hybrid(family), DROPPING[name], (0,), (11,))
    assert_as_whole(hybrid(family), DROPPING[name], ALL_ROWS, (11,), turns=1)


def assert_as_whole(
    model: PreTrainedModel,
    policy: CachePolicy,
    rows: tuple[int, ...],
    chunks: tuple[int, ...],
    turns: int = 2,
    **how: Any,
) -> None:
    """In chunks the conversation is what it is read at once: kept, passed on, logits, tokens."""
    if turns == 1:
        said = one_turn(model, policy, rows, None, **how)
        for chunk in chunks:
            assert (one_turn(model, policy, rows, chunk, **how) - said).abs().max() < TOLERANCE
        return
    _, want = run_conversation(model, policy, rows, LONG, **how)
    for chunk in chunks:
        _, found = run_conversation(model, policy, rows, LONG, prefill_chunk_size=chunk, **how)
        assert_alike(found, want, TOLERANCE / 10)


def one_turn(
    model: PreTrainedModel,
    policy: CachePolicy,
    rows: tuple[int, ...],
    chunk: int | None,
    **how: Any,
) -> Tensor:
    ids, mask = left_padded([random_tokens(row, LONG.first[row]) for row in rows])
    store = PolicyCache(policy)
    return run_turn(model, store, ids, mask, 3, prefill_chunk_size=chunk, **how).logits


PROMPT = torch.tensor([random_tokens(0, 50)])


def generate(
    model: PreTrainedModel, cache: PolicyCache, ids: Tensor = PROMPT, **how: Any
) -> Tensor:
    options = {"max_new_tokens": 6, "do_sample": False, **how}
    found: Any = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **options)
    return found if isinstance(found, Tensor) else found.sequences


@pytest.mark.parametrize("name", DROPPING)
@torch.no_grad()
def test_by_hand(name: str) -> None:
    """Chunks before the last have no hidden states to show; the last one's own tokens have."""
    model, policy = model_of("llama"), DROPPING[name]
    whole, chunked = PolicyCache(policy), PolicyCache(policy)
    with whole.attached(model):
        want = model(PROMPT, cache=whole).logits
    with chunked.attached(model):
        chunked.start_turn(prompt_len=50)
        for start in (0, 20):
            before = [layer.kept_len for layer in chunked.layers]
            chunk = model(PROMPT[:, start : start + 20], cache=chunked)
            assert chunk.logits.shape == (1, 0, model.config.vocab_size)
            grown = {layer.kept_len - b for layer, b in zip(chunked.layers, before, strict=True)}
            assert grown <= {20, 0}
        found = model(PROMPT[:, 40:], cache=chunked).logits
    assert 1 <= found.shape[1] <= 10
    assert (found - want[:, -found.shape[1] :]).abs().max() < TOLERANCE
    assert chunked.get_seq_length() == 50
    assert str(chunked.report()) == str(whole.report())


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gemma3n", "a layer borrows keys of another, as layer"),
        ("falcon_h1", "a layer holds a state beside its keys, as layer 0 does"),
        ("gpt2", "the decoder gives its output the shape of its input"),
    ],
)
def test_kinds_of_layers_that_are_refused(family: str, words: str) -> None:
    """For the one reason that there is, before anything is computed."""
    policy = attrs.evolve(DROPPING["fastkv"], tsp_layer=None)
    model = model_of(family) if family in BUILDS else hybrid(family)
    cache = PolicyCache(policy)
    with pytest.raises(UnsupportedModelError, match=words):
        generate(model, cache, prefill_chunk_size=13)
    assert cache.get_seq_length() == 0
    generate(model, cache)


def test_hidden_states_of_a_prompt_in_chunks_are_refused() -> None:
    cache = PolicyCache(DROPPING["fastkv"])
    how: dict[str, Any] = {"output_hidden_states": True, "return_dict_in_generate": True}
    with pytest.raises(UnsupportedGenerationError, match="output_hidden_states"):
        generate(model_of("llama"), cache, prefill_chunk_size=13, **how)
    assert cache.get_seq_length() == 0
    generate(model_of("llama"), cache)


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
@torch.no_grad()
def test_what_a_later_chunk_asks_for_is_refused_as_well(asked: str) -> None:
    model, cache = model_of("llama", "eager"), PolicyCache(DROPPING["fastkv"])
    with cache.attached(model):
        cache.start_turn(prompt_len=50)
        model(PROMPT[:, :20], cache=cache)
        for stop in (40, 50):
            with pytest.raises(UnsupportedGenerationError, match=asked):
                model(PROMPT[:, 20:stop], cache=cache, **{asked: True})
        output = model(PROMPT[:, 20:], cache=cache)
    want = read_by_hand(DROPPING["fastkv"], 50, embeddings=False)[:, 0]
    assert (output.logits[:, -1] - want).abs().max() < TOLERANCE


@torch.no_grad()
def read_by_hand(policy: CachePolicy, chunk: int, embeddings: bool) -> Tensor:
    """Last logits of a prompt and of the token behind it, given as ids or as embeddings."""
    model, cache = model_of("llama"), PolicyCache(policy)
    found = []
    with cache.attached(model):
        cache.start_turn(prompt_len=50)
        for ids in [*PROMPT.split(chunk, dim=1), torch.tensor([[7]])]:
            given = (
                {"inputs_embeds": model.get_input_embeddings()(ids)}
                if embeddings
                else {"input_ids": ids}
            )
            output: Any = model(**given, cache=cache)
            found.append(output.logits[:, -1:])
    return torch.cat(found[-2:], dim=1)


@pytest.mark.parametrize("name", DROPPING)
def test_embeddings_in_chunks(name: str) -> None:
    """What is read again is read from embeddings, where those are what was given."""
    want = read_by_hand(DROPPING[name], 50, embeddings=False)
    for chunk in (50, 13, 49):
        found = read_by_hand(DROPPING[name], chunk, embeddings=True)
        assert (found - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("chunk", [50, 13])
def test_embeddings_are_not_read_twice(chunk: int) -> None:
    with pytest.raises(UnsupportedGenerationError, match=r"input_ids of the whole context .*KVzip"):
        read_by_hand(kvpolicy.build("kvzip"), chunk, embeddings=True)


@pytest.mark.parametrize("name", DROPPING)
@torch.no_grad()
def test_chunks_of_ids_and_of_embeddings_are_refused(name: str) -> None:
    model, cache = model_of("llama"), PolicyCache(DROPPING[name])
    with cache.attached(model):
        cache.start_turn(prompt_len=50)
        model(PROMPT[:, :20], cache=cache)
        embeds = model.get_input_embeddings()(PROMPT[:, 20:])
        for stop in (15, 30):
            with pytest.raises(UnsupportedGenerationError, match="input_ids or all inputs_embeds"):
                model(inputs_embeds=embeds[:, :stop], cache=cache)
        output = model(PROMPT[:, 20:], cache=cache)
    want = read_by_hand(DROPPING[name], 50, embeddings=False)[:, 0]
    assert (output.logits[:, -1] - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["snapkv", "gemfilter"])
@pytest.mark.parametrize("ids", [None, PROMPT], ids=["embeddings", "with_ids"])
def test_generate_cuts_no_embeddings(name: str, ids: Tensor | None) -> None:
    """Transformers would give all of them with the positions of the first chunk's ids."""
    model, cache = model_of("llama"), PolicyCache(METHODS.get(name, (DROPPING.get(name),))[0])
    embeds = model.get_input_embeddings()(PROMPT)
    with pytest.raises(
        UnsupportedGenerationError, match="prefill_chunk_size must be None with inp"
    ):
        model.generate(
            ids, inputs_embeds=embeds, cache=cache, prefill_chunk_size=13, max_new_tokens=2
        )
    assert not cache.get_seq_length()
