"""Tests the slow references of latent attention, indexers and recurrent layers."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.integrations.model.builds.dense import Seen, dense_logits
from tests.reference import (
    FastKV,
    FullContext,
    GemFilter,
    KeyDiff,
    Method,
    PyramidInfer,
    ReferenceState,
    SnapKV,
    StreamingLLM,
    random_tokens,
)
from tests.reference.attention import attention_probabilities
from tests.reference.comparing import max_error
from tests.reference.cut import cut_logits
from tests.reference.decoder import decoder_layers, embed, rms_norm
from tests.reference.delta_net import DeltaState, read_tokens
from tests.reference.family_dense import family_logits
from tests.reference.hybrid import HybridState, attending_layers, default_layer
from tests.reference.indexed import IndexedState
from tests.reference.latent import LatentState, absorb, expanded_queries, latent_entries
from tests.reference.mixed_models import (
    FULL,
    HAS_INDEXERS,
    LINEAR,
    hybrid_model,
    indexed_model,
    latent_model,
)

TOLERANCE = 1e-4
MIXED: dict[str, tuple[Callable[..., PreTrainedModel], type[ReferenceState]]] = {
    "latent": (latent_model, LatentState),
    "hybrid": (hybrid_model, HybridState),
}
if HAS_INDEXERS:
    MIXED["indexed"] = (indexed_model, IndexedState)
    MIXED["indexed, all picked"] = (partial(indexed_model, index_topk=99), IndexedState)
KEEPS_ALL: list[Method] = [SnapKV(1.0), FastKV(1.0, tsp_rate=1.0), GemFilter(retention_rate=1.0)]
EVICTS: list[Method] = [
    StreamingLLM(0.3, num_sinks=3),
    SnapKV(0.3, window_size=5, kernel_size=3),
    KeyDiff(0.3, window_size=2),
    FastKV(0.25, window_size=4, kernel_size=3, tsp_rate=0.45),
    PyramidInfer(decay_ratio=0.5, min_context=4),
]
mixed = pytest.mark.parametrize("kind", MIXED)


@torch.no_grad()
def whole(model: PreTrainedModel, row: list[int]) -> Tensor:
    """Returns the model's logits `[len, vocab]` from one forward without a cache."""
    logits: Tensor = cast(Any, model)(torch.tensor([row]), use_cache=False).logits[0]
    return logits


@mixed
@pytest.mark.parametrize("seed", range(3))
def test_two_turns_in_full_equal_one_forward(kind: str, seed: int) -> None:
    build, state_class = MIXED[kind]
    model = build(seed)
    state = state_class(model, FullContext())
    prompt, question = random_tokens(seed, 43), random_tokens(seed + 9, 17)
    first = state.turn(prompt, 6)
    second = state.turn(question, 6)
    row = [*prompt, *first.tokens[:-1], *question, *second.tokens[:-1]]
    theirs = whole(model, row)
    for turn in (first, second):
        assert max_error(turn.logits, theirs[turn.end - 1 : turn.end + 6]) < TOLERANCE
        assert 0.5 < float(turn.logits.std()) < 4
    assert len(set(first.tokens)) > 2


@mixed
@pytest.mark.parametrize("method", KEEPS_ALL, ids=str)
def test_keeping_everything_equals_full_context(kind: str, method: Method) -> None:
    build, state_class = MIXED[kind]
    model = build(4)
    results = []
    for each in (FullContext(), method):
        state = state_class(model, each)
        results.append([state.turn(random_tokens(5 + at, 21), 2) for at in range(2)])
    for full, ours in zip(*results, strict=True):
        assert torch.equal(full.logits, ours.logits)
        assert ours.propagated == {}


@mixed
def test_attention_is_peaked(kind: str) -> None:
    model = MIXED[kind][0](2, attn_implementation="eager")
    with torch.no_grad():
        attentions = cast(Any, model)(
            torch.tensor([random_tokens(3, 60)]), output_attentions=True
        ).attentions
    assert len(attentions) == (2 if kind == "hybrid" else 4)
    for probabilities in attentions:
        assert float(probabilities[0, :, 10:].amax(-1).median()) > 0.25


@torch.no_grad()
def test_absorbed_queries_attend_as_expanded_ones() -> None:
    model = latent_model(6)
    layer = decoder_layers(model)[1]
    positions = list(range(3, 30))
    normed = rms_norm(embed(model, random_tokens(1, 27)), layer.input_layernorm)
    entries = latent_entries(layer.self_attn, normed, positions, positions)
    for head, queries in enumerate(expanded_queries(layer.self_attn, normed, positions)):
        expanded = [entry.heads[head] for entry in entries]
        back = absorb(layer.self_attn, head, queries)
        scaling = float(layer.self_attn.scaling)
        assert (
            max_error(
                attention_probabilities(queries, positions, expanded, scaling),
                attention_probabilities(back, positions, entries, scaling),
            )
            < 1e-5
        )


@pytest.mark.parametrize("method", EVICTS, ids=str)
def test_latent_choices_equal_the_models_own_attention_masked(method: Method) -> None:
    """Eviction and dropping give the same logits as masking, in prefill and decoding."""
    model = latent_model(9, attn_implementation="eager")
    prompt = random_tokens(3, 47)
    turn = LatentState(model, method).turn(prompt, 7)
    assert all(len(layer) == 1 for layer in turn.kept)
    theirs = family_logits(model, [*prompt, *turn.tokens[:-1]], turn.act)[46:]
    assert max_error(turn.logits, theirs) < TOLERANCE
    full = LatentState(model, FullContext()).turn(prompt, 7, forced=turn.tokens[:-1])
    assert max_error(turn.decode_logits, full.decode_logits) > 0.1


@pytest.mark.skipif(not HAS_INDEXERS, reason="no such model yet")
@pytest.mark.parametrize("method", EVICTS[:3], ids=str)
def test_what_was_evicted_is_not_picked(method: Method) -> None:
    """Each token's logits equal those of the model's layers run on the tokens it sees."""
    model = indexed_model(9)
    prompt = random_tokens(3, 47)
    turn = IndexedState(model, method).turn(prompt, 7)
    row = [*prompt, *turn.tokens[:-1]]
    seen = []
    for kept in turn.kept:
        keys = torch.ones(1, len(row), len(row), dtype=torch.bool)
        keys[:, 47:, :47] = False
        keys[:, 47:, kept[0]] = True
        seen.append(Seen(keys, torch.ones(len(row), dtype=torch.bool)))
    theirs = dense_logits(model, row, 47, seen)[46:]
    assert max_error(turn.logits, theirs) < TOLERANCE
    full = IndexedState(model, FullContext()).turn(prompt, 7, forced=turn.tokens[:-1])
    assert max_error(turn.decode_logits, full.decode_logits) > 0.1


@pytest.mark.parametrize("method", EVICTS, ids=str)
def test_hybrid_choices_equal_the_models_own_layers_cut(method: Method) -> None:
    """Upper layers of both kinds read only passed-on tokens, and evicted tokens are masked."""
    model = hybrid_model(9, layer_types=(LINEAR, FULL, LINEAR, FULL, LINEAR))
    prompt = random_tokens(3, 47)
    turn = HybridState(model, method).turn(prompt, 7)
    assert [len(layer) for layer in turn.kept] == [0, 2, 0, 2, 0]
    theirs = cut_logits(model, [*prompt, *turn.tokens[:-1]], turn.act)
    assert max_error(turn.logits, theirs) < TOLERANCE
    full = HybridState(model, FullContext()).turn(prompt, 7, forced=turn.tokens[:-1])
    assert max_error(turn.decode_logits, full.decode_logits) > 0.1


@pytest.mark.parametrize("kind", [kind for kind in MIXED if kind != "indexed"])
def test_choices_follow_from_the_models_own_attention(kind: str) -> None:
    """SnapKV's choices follow from the model's own attention in a full prefill.

    Models with an indexer are left out: there, methods are shown more than a query attends to.
    """
    build, state_class = MIXED[kind]
    model = build(6, attn_implementation="eager")
    prompt = random_tokens(11, 53)
    turn = state_class(model, SnapKV(0.3, window_size=5, kernel_size=3)).turn(prompt, 0)
    with torch.no_grad():
        attentions = cast(Any, model)(torch.tensor([prompt]), output_attentions=True).attentions
    holding = [layer for layer in turn.kept if layer]
    assert len(holding) == len(attentions)
    for kept, probabilities in zip(holding, attentions, strict=True):
        sums = probabilities[0, :, -5:, :-5].sum(1)
        pooled = torch.nn.functional.max_pool1d(sums[None], 3, stride=1, padding=1)[0]
        for positions, scores in zip(kept, pooled.view(len(kept), -1, 48).mean(1), strict=True):
            order = scores.argsort(descending=True, stable=True)[:10]  # int(53 * 0.3) - 5
            assert positions == [*order.sort().values.tolist(), *range(48, 53)]


@torch.no_grad()
def test_delta_net_equals_the_models_module() -> None:
    """Reading token by token in two pieces equals the module's chunked computation."""
    model = hybrid_model(5)
    module = decoder_layers(model)[0].linear_attn
    normed = torch.randn(70, 48, generator=torch.Generator().manual_seed(2))
    first, state = read_tokens(module, normed[:31], DeltaState())
    second, _ = read_tokens(module, normed[31:], state)
    theirs = module(normed[None])[0]
    assert max_error(torch.cat([first, second]), theirs) < 1e-5
    alone, _ = read_tokens(module, normed[31:], DeltaState())
    assert max_error(alone[10:], second[10:]) > 0.05  # what was read long ago is remembered


def test_default_layers() -> None:
    kinds = (LINEAR, FULL, LINEAR, LINEAR, LINEAR, FULL, LINEAR, LINEAR)
    model = hybrid_model(1, layer_types=kinds)
    assert attending_layers(model) == [1, 5]
    assert default_layer([1, 5], 8) == 5  # both are two away from 3
    assert default_layer([1, 3], 4) == 1
    assert default_layer([0, 2, 7], 8) == 2
    turn = HybridState(model, FastKV(0.3, tsp_rate=0.5)).turn(random_tokens(1, 40), 0)
    assert [len(reached) for reached in turn.reached] == [40] * 6 + [20] * 2
    turn = HybridState(model, GemFilter(retention_rate=0.3)).turn(random_tokens(1, 40), 0)
    assert list(turn.propagated) == [5]


def test_a_restart_leaves_nothing_of_the_first_pass() -> None:
    """Both turns equal a forward over a row of the chosen tokens alone."""
    model = hybrid_model(3)
    state = HybridState(model, GemFilter(retention_rate=0.4))
    prompt, question = random_tokens(4, 41), random_tokens(5, 37)
    first = state.turn(prompt, 3)
    chosen = [prompt[at] for at in first.propagated[1]]
    row = [*chosen, *first.tokens[:-1]]
    assert len(chosen) == 16
    assert max_error(first.logits, whole(model, row)[15:]) < TOLERANCE
    second = state.turn(question, 3)
    chosen = [question[at - first.end - 3] for at in second.propagated[1]]
    assert len(chosen) == 32  # int(81 * 0.4)
    row = [*row, *chosen, *second.tokens[:-1]]
    assert max_error(second.logits, whole(model, row)[-4:]) < TOLERANCE
