"""A declaration is believed of anybody's part, and of no subclass that changes what it is of."""

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy, KVSelector, LayerContext, Scorer
from kvpolicy.attention import group_mean
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.forward.facts import keeps_everything
from kvpolicy.policies import (
    AccumulatedAttentionScorer,
    GQAGroupSelector,
    KeepAllSelector,
    PassAllPropagation,
    SnapKV,
)
from kvpolicy.testing import check_scorer, check_selector
from tests.integrations.forward.test_chunked_prefill import (
    ALL_ROWS,
    PROMPT,
    TOLERANCE,
    assert_as_whole,
    model_of,
)
from tests.integrations.test_generation import CHUNKS_GO_ON


def attention_of(context: LayerContext) -> Tensor:
    """``[batch, query_heads, query_len, key_len]``: what the tokens that are shown attend to."""
    group = context.query_heads // context.kv_heads
    keys = context.keys.float().repeat_interleave(group, dim=1)
    places = torch.arange(context.key_len)
    behind = places > places[-context.query_len :, None] if context.query_len else places[:0, None]
    hidden = behind | ~context.valid.repeat_interleave(group, dim=1)[:, :, None]
    logits = (context.queries.float() @ keys.transpose(2, 3)) * context.attention.scaling
    shown = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    is_token = context.new_valid[:, context.new_len - context.query_len :]
    return shown.nan_to_num() * is_token[:, None, :, None]


@attrs.frozen
class SquaredAttention(Scorer):
    """Squares of what every token attends to, summed."""

    @property
    def num_queries(self) -> None:
        return

    def score(self, context: LayerContext) -> Tensor:
        return attention_of(context).square().sum(dim=2)


@attrs.frozen
class SummingSquares(SquaredAttention):
    """The same, by sums that are carried on."""

    @property
    def accumulates(self) -> bool:
        return True

    @property
    def state_size(self) -> int:
        return 1

    def update(self, context: LayerContext) -> tuple[Tensor, Tensor]:
        sums = group_mean(self.score(context), context.kv_heads)
        if context.decoding.state is not None:
            sums = sums + context.decoding.state[..., 0]
        return sums, sums[..., None]


@attrs.frozen
class ChangedSums(AccumulatedAttentionScorer):
    """Changes what the sums are of, and says nothing of what is carried on."""

    def score(self, context: LayerContext) -> Tensor:
        return attention_of(context).square().sum(dim=2)


def policy_of(scorer: Scorer) -> CachePolicy:
    return CachePolicy(scorer, GQAGroupSelector(0.25, window_size=2), PassAllPropagation())


@torch.no_grad()
def read_in_chunks(scorer: Scorer) -> tuple[PolicyCache, Tensor, list[int], dict[int, Tensor]]:
    """A prompt of 50 tokens in three chunks: what is held behind two of them, and the end."""
    model, cache = model_of("llama"), PolicyCache(policy_of(scorer))
    with cache.attached(model):
        cache.start_turn(prompt_len=50)
        for start in (0, 20):
            model(PROMPT[:, start : start + 20], cache=cache)
        chunks = cache._reader.now.chunks
        assert chunks is not None
        logits = model(PROMPT[:, 40:], cache=cache).logits
    held = [queries[0].shape[2] for _, queries in chunks.parts if queries]
    return cache, logits, held, dict(chunks.carried)


def test_sums_of_a_third_party_are_held_in_place_of_queries() -> None:
    summing, logits, queries, sums = read_in_chunks(SummingSquares())
    assert not queries
    model = model_of("llama")
    config = model.config
    shape = (1, config.num_key_value_heads, 40, 1)
    shapes = {index: tuple(each.shape) for index, each in sums.items()}
    assert shapes == dict.fromkeys(range(config.num_hidden_layers), shape)
    remembering, expected, queries, sums = read_in_chunks(SquaredAttention())
    assert sums == {}
    assert queries == [20, 20]
    assert (logits[:, -1] - expected[:, -1]).abs().max() < TOLERANCE
    whole = PolicyCache(policy_of(SquaredAttention()))
    with torch.no_grad(), whole.attached(model):
        model(PROMPT, cache=whole)
    for own, other, wanted in zip(summing.layers, remembering.layers, whole.layers, strict=True):
        assert torch.equal(own.positions, wanted.positions)
        assert torch.equal(other.positions, wanted.positions)


@pytest.mark.skipif(not CHUNKS_GO_ON, reason="this Transformers cuts masks of chunks wrongly")
@pytest.mark.parametrize("scorer", [SummingSquares(), ChangedSums()], ids=str)
@pytest.mark.parametrize("rows", [(0,), ALL_ROWS], ids=["single", "padded"])
def test_chunks_are_as_the_whole(scorer: Scorer, rows: tuple[int, ...]) -> None:
    assert_as_whole(model_of("llama"), policy_of(scorer), rows, (13,))


def test_a_subclass_that_changes_the_score_is_not_taken_for_its_parent() -> None:
    _, _, queries, sums = read_in_chunks(ChangedSums())
    assert sums == {}
    assert queries == [20, 20]


@attrs.frozen
class Everything(KVSelector):
    """Keeps all."""

    @property
    def needs_saliency(self) -> bool:
        return False

    @property
    def keeps_all(self) -> bool:
        return True

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        return KeepAllSelector().select(saliency, context)


@attrs.frozen
class AllButTheFirst(Everything):
    """Changes what is kept, and says nothing of it."""

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        return super().select(saliency, context)[..., 1:]


def test_who_keeps_everything_says_so() -> None:
    def keeps(selector: KVSelector) -> bool:
        return keeps_everything(CachePolicy(None, selector, PassAllPropagation()), 4)

    assert keeps(Everything())
    assert keeps(KeepAllSelector())
    assert keeps_everything(SnapKV(1.0), 4)
    assert not keeps(AllButTheFirst())
    assert not keeps_everything(SnapKV(0.5), 4)


@pytest.mark.parametrize("scorer", [SummingSquares()], ids=str)
def test_the_contract_holds_for_those_who_declare(scorer: Scorer) -> None:
    check_scorer(scorer)


def test_the_contract_holds_for_who_keeps_everything() -> None:
    check_selector(Everything())
