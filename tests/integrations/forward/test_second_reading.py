"""A second reading of prompts: by a family's own attention, and all that may come of it."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy import CachePolicy, Repetition
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import (
    GlobalThresholdSelector,
    KVzip,
    PassAllPropagation,
    PeakAttentionScorer,
    TokenSelectivePropagation,
)
from tests.families import FAMILIES
from tests.integrations.hybrids.models import hybrid
from tests.integrations.support.conversation import left_padded
from tests.integrations.support.reading import assert_same_positions, read
from tests.reference import random_tokens, tiny_model
from tests.reference.attention import Entry
from tests.reference.together import Together

CHUNK, SINKS, OVERLAP, INSTRUCTION = 13, 2, 5, (5, 6, 7)
RATE = 0.4
POLICY = CachePolicy(
    PeakAttentionScorer(),
    GlobalThresholdSelector(RATE, window_size=2),
    PassAllPropagation(),
    rereading=Repetition(CHUNK, num_sinks=SINKS, overlap=OVERLAP, instruction_ids=INSTRUCTION),
)
# Plain; caps; sinks beside windows; windows; latents; states.
NAMES = ("llama", "gemma2", "gpt_oss", "gemma3", "deepseek_v3", "qwen3_next", "lfm2")
# Rows of one length where states cannot skip padding behind tokens.
WITH_STATES = ("qwen3_next", "lfm2")
LENGTHS = (37, 22)
SEED = 42


@cache
def model_of(name: str, implementation: str | None = None) -> PreTrainedModel:
    if name not in FAMILIES:
        return hybrid(name)
    own = {} if implementation is None else {"attn_implementation": implementation}
    return FAMILIES[name].build(seed=1, **own)


@torch.no_grad()
def own_scores(name: str, ids: Sequence[int]) -> dict[int, Tensor]:
    """By layer that sees everything, float32 ``[query_heads, len]``, of one prompt by itself."""
    model = model_of(name, "eager")
    held: Any = DynamicCache(config=model.config)
    model(torch.tensor([list(ids)]), **{CACHE: held})
    found: dict[int, Tensor] = {}
    for start in range(0, len(ids), CHUNK):
        stop = min(start + CHUNK, len(ids))
        fed = [*INSTRUCTION, *ids[max(start - OVERLAP, 0) : start], *ids[start:stop]]
        places = torch.arange(len(ids), len(ids) + len(fed))[None]
        output = model(
            torch.tensor([fed]),
            position_ids=places,
            **{CACHE: copy.deepcopy(held)},
            output_attentions=True,
        )
        for index, weights in enumerate(attentions_by_layer(model, output.attentions)):
            if weights is None or weights.shape[-1] != len(ids) + len(fed):
                continue
            columns = [*range(start, stop), *range(len(ids), len(ids) + len(fed))]
            columns += [column for column in range(SINKS) if column < start]
            # What a softmax over some of the keys has: a learned sink keeps what it has of all.
            beside = 1 - weights.sum(dim=-1)
            own = (
                weights[0]
                / (weights[0][..., columns].sum(-1) + beside[0]).clamp(min=1e-9)[..., None]
            )
            most = own[..., start:stop].amax(dim=1)
            scores = found.setdefault(index, torch.zeros(most.shape[0], len(ids)))
            scores[:, start:stop] = most
    return found


def attentions_by_layer(model: PreTrainedModel, attentions: Sequence[Any]) -> list[Any]:
    """For each layer its weights ``[1, heads, queries, keys]``; None where it has a state."""
    types = getattr(model.config, "layer_types", None)
    count = model.config.num_hidden_layers
    if len(attentions) == count:
        windows = [types and "sliding" in types[index] for index in range(count)]
        return [None if w else each for w, each in zip(windows, attentions, strict=True)]
    left = iter(attentions)
    return [next(left) if kind == "full_attention" else None for kind in types]


def wanted(name: str, ids: Sequence[int], stored_heads: int) -> tuple[dict[int, Any], float]:
    """By layer and head, the positions that one threshold keeps; and how near it was."""
    scores = own_scores(name, ids)
    by_head: list[list[list[float]]] = []
    for each in scores.values():
        if stored_heads == 1:
            by_head.append([each.mean(dim=0).tolist()])
        else:
            by_head.append(each.view(stored_heads, -1, len(ids)).amax(dim=1).tolist())
    none = torch.empty(0)
    entries = [
        [[Entry(position, none, none) for position in range(len(ids))] for _ in heads]
        for heads in by_head
    ]
    chosen, gap = Together(RATE, window_size=2).choose_all(entries, by_head, len(ids), len(ids))
    return dict(zip(scores, chosen, strict=True)), gap


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_the_family_s_own_attention(name: str) -> None:
    lengths = LENGTHS[:1] * 2 if name in WITH_STATES else LENGTHS
    rows = [random_tokens(SEED + row, length) for row, length in enumerate(lengths)]
    ids, mask = left_padded(rows)
    store = PolicyCache(POLICY)
    with torch.no_grad(), store.attached(model_of(name)):
        model_of(name)(ids, attention_mask=mask, cache=store)
    for row, own in enumerate(rows):
        layers = [layer for layer in store.layers if layer.positions is not None]
        heads = max(layer.positions.shape[1] for layer in layers)
        expected, gap = wanted(name, own, heads)
        assert gap > 1e-4, "a near tie: take another seed"
        assert expected
        for index, kept in expected.items():
            found = store.layers[index].positions[row].tolist()
            assert [[each for each in head if each >= 0] for head in found] == kept
        for index, layer in enumerate(store.layers):
            if index not in expected and layer.positions is not None:  # what its window sees
                held = layer.positions[row, 0]
                first = len(own) - FAMILIES[name].window + 1
                assert held[held >= 0].tolist() == list(range(max(first, 0), len(own)))


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3", "qwen3_next"])
def test_an_answer_goes_on_from_the_first_reading(name: str) -> None:
    """States, windows and logits are those before the repetition."""
    model, ids = model_of(name), torch.tensor([random_tokens(3, 30)])
    whole = CachePolicy(
        PeakAttentionScorer(),
        GlobalThresholdSelector(1.0),
        PassAllPropagation(),
        rereading=POLICY.rereading,
    )
    full = model.generate(ids, max_new_tokens=6, do_sample=False)
    again = model.generate(ids, max_new_tokens=6, do_sample=False, cache=PolicyCache(whole))
    assert again.tolist() == full.tolist()


@cache
def llama() -> PreTrainedModel:
    return tiny_model("llama", seed=3)


def test_a_prompt_that_is_all_system_prompt() -> None:
    """There is nothing to repeat, and nothing to score."""
    ids = torch.tensor([random_tokens(1, 20)])
    for name in ("llama", "deepseek_v3"):
        model, store = model_of(name), PolicyCache(KVzip(0.3, whole_tokens=20))
        again = model.generate(ids, cache=store, max_new_tokens=4, do_sample=False)
        full = model.generate(ids, max_new_tokens=4, do_sample=False)
        assert again.tolist() == full.tolist()
        assert all(layer.kept_len == 23 for layer in store.layers)


class Breaks(PeakAttentionScorer):
    """Fails at a layer of the second chunk."""

    calls = 0

    def score(self, context: Any) -> Tensor:
        type(self).calls += 1
        if type(self).calls == 6:
            raise KeyboardInterrupt
        return super().score(context)


@pytest.mark.parametrize("of_decoder", [False, True])
def test_a_failure_is_undone(of_decoder: bool) -> None:
    """Also in a call of the decoder alone."""
    Breaks.calls = 0
    policy = CachePolicy(
        Breaks(), GlobalThresholdSelector(0.3), PassAllPropagation(), rereading=Repetition(17)
    )
    store, ids = PolicyCache(policy), torch.tensor([random_tokens(1, 45)])
    module = llama().model if of_decoder else llama()
    with torch.no_grad(), store.attached(llama()):
        with pytest.raises(KeyboardInterrupt):
            module(ids, cache=store)
        assert store.get_seq_length() == 0
        assert all(layer.kept_len == 0 for layer in store.layers)
        module(ids, cache=store)
    assert not llama().model._forward_hooks
    fresh = attrs.evolve(policy, scorer=PeakAttentionScorer())
    assert_same_positions(store, read(llama(), fresh, ids)[0])


def test_embeddings_are_refused() -> None:
    store = PolicyCache(KVzip())
    embeddings = llama().get_input_embeddings()(torch.tensor([random_tokens(1, 20)]))
    with store.attached(llama()), pytest.raises(ValueError, match="input_ids of the whole context"):
        llama()(inputs_embeds=embeddings, cache=store)
    assert store.get_seq_length() == 0


def test_drops_and_restarts_are_refused() -> None:
    policy = CachePolicy(
        PeakAttentionScorer(),
        GlobalThresholdSelector(),
        TokenSelectivePropagation(tsp_layer=1, tsp_rate=0.5),
        rereading=Repetition(),
    )
    with (
        pytest.raises(ValueError, match="rereading must be None if tokens are dropped"),
        PolicyCache(policy).attached(llama()),
    ):
        pass


def test_a_model_that_has_no_positions_left() -> None:
    model = FAMILIES["gpt2"].build(seed=1)
    store = PolicyCache(KVzip(0.5))
    ids = torch.tensor([random_tokens(1, 300)])
    with pytest.raises(ValueError, match="prompt and its second reading must fit into"):
        model.generate(ids, cache=store, max_new_tokens=2, do_sample=False)
    assert store.get_seq_length() == 0
