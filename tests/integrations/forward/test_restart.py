"""Policies that restart the prefill: what is computed, and the cache in use."""

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy import CachePolicy, LayerContext, PropagationPolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.layer_inputs import AttentionSettings
from kvpolicy.policies import GemFilter, KeepAllSelector, LastQueryProductScorer
from kvpolicy.selection import compress
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.support.conversation import left_padded, prompt
from tests.integrations.support.reading import Counts, read
from tests.integrations.support.versions import OLD
from tests.reference import random_tokens, tiny_model

GEM = GemFilter(filter_layer=2, retention_rate=0.3)


def tokens_of(model: PreTrainedModel, ids: Tensor, cache: Any, **kwargs: Any) -> list[int]:
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    output = model.generate(ids, **{CACHE: cache}, max_new_tokens=7, do_sample=False, **kwargs)
    return output[0, ids.shape[1] :].tolist()


def test_the_first_pass_computes_nothing_that_it_does_not_need() -> None:
    model = tiny_model("llama", seed=1)
    counts = Counts(model)
    read(model, GEM, prompt(60))
    for layer in range(len(model.model.layers)):
        projected = 60 * (layer <= 2) + 18
        completed = 60 * (layer < 2) + 18
        assert counts.tokens["q_proj", layer] == counts.tokens["k_proj", layer] == projected
        assert counts.tokens["o_proj", layer] == counts.tokens["mlp", layer] == completed


def test_positions_that_do_not_start_at_0_are_refused() -> None:
    model = tiny_model("llama", seed=1)
    counts = Counts(model)
    cache, ids, at = PolicyCache(GEM), prompt(20), torch.arange(20)[None]
    message = "position_ids must count each row's own tokens from 0 if RestartPropagation.*"
    with torch.no_grad(), cache.attached(model):
        with pytest.raises(ValueError, match=message + "0 for a token of row 0, got 7"):
            model(ids, cache=cache, position_ids=at + 7)
        assert not counts.tokens
        assert cache.get_seq_length() == 0
        model(ids, cache=cache, position_ids=at)
        before = counts.tokens.copy()
        cache.start_turn()
        with pytest.raises(ValueError, match=message + "20 for a token of row 0, got 21"):
            model(ids, cache=cache, position_ids=at + 21)
        assert counts.tokens == before
        assert cache.get_seq_length() == 20
        model(ids, cache=cache, position_ids=at + 20)
        assert cache.get_seq_length() == 40


def test_hidden_states_are_those_of_the_second_pass(model: PreTrainedModel) -> None:
    ids, mask = left_padded([random_tokens(0, 60), random_tokens(1, 40)])
    cache = PolicyCache(GEM)
    with torch.no_grad(), cache.attached(model):
        output = model(ids, attention_mask=mask, cache=cache, output_hidden_states=True)
    assert [state.shape[1] for state in output.hidden_states] == [18] * 5
    chosen = cache.propagated[2]
    assert (chosen[1] < 0).tolist() == [True] * 6 + [False] * 12
    embedded = model.get_input_embeddings()(ids[0, chosen[0]])
    assert torch.equal(output.hidden_states[0][0], embedded)


@attrs.frozen
class Uneven(PropagationPolicy):
    """Passes on the last ``5 + 3 * row`` tokens of each row, after layer 1."""

    restart: bool = False

    @property
    def restarts(self) -> bool:
        return self.restart

    @property
    def needs_saliency(self) -> bool:
        return False

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        return frozenset({1})

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        lens = 5 + 3 * torch.arange(context.batch)
        slots = torch.arange(context.new_len)
        return compress(slots >= context.new_len - lens[:, None], int(lens.max()))


@pytest.mark.parametrize("restart", [False, True])
def test_rows_without_padding_may_pass_on_different_numbers(
    model: PreTrainedModel, restart: bool
) -> None:
    """Together each row gives what it gives as the same row of a batch of its own copies."""
    policy = CachePolicy(None, KeepAllSelector(), Uneven(restart))
    ids = torch.cat([prompt(40, seed=row) for row in range(3)])
    more = torch.cat([ids, prompt(9, seed=7).expand(3, -1)], dim=1)

    @torch.no_grad()
    def run(ids: Tensor, more: Tensor) -> list[Tensor]:
        cache = PolicyCache(policy)
        with cache.attached(model):
            first = model(ids, cache=cache).logits[:, -1]
            second = model(more[:, 40:43], cache=cache).logits
            cache.start_turn()
            return [first, second, model(more[:, 43:], cache=cache).logits[:, -1]]

    together = run(ids, more)
    for row in range(3):
        # A batch of copies: the number passed on depends on the row's place.
        copies = run(ids[[row] * 3], more[[row] * 3])
        for one, other in zip(together, copies, strict=True):
            assert torch.allclose(one[row], other[row], atol=1e-5)
    # The row that passes on most is padded nowhere.
    alone = run_last_alone(model, ids[2:], 11, restart)
    assert torch.allclose(together[0][2:], alone, atol=1e-5)


@torch.no_grad()
def run_last_alone(model: PreTrainedModel, ids: Tensor, count: int, restart: bool) -> Tensor:
    """Logits after one row whose last ``count`` tokens go on, by a plain mask or a plain prompt."""
    if restart:
        return model(ids[:, -count:]).logits[:, -1]

    @attrs.frozen
    class Last(Uneven):
        def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
            return torch.arange(context.new_len - count, context.new_len)[None]

    cache = PolicyCache(CachePolicy(None, KeepAllSelector(), Last()))
    with cache.attached(model):
        return model(ids, cache=cache).logits[:, -1]


@pytest.mark.parametrize("layer", [4, 99])
def test_a_filter_layer_outside_the_model(model: PreTrainedModel, layer: int) -> None:
    cache = PolicyCache(GemFilter(filter_layer=layer))
    with pytest.raises(ValueError, match=rf"filter_layer must be in \[0, 3\].*got {layer}"):
        tokens_of(model, prompt(40), cache)


def test_the_scorer_by_hand() -> None:
    """Keys 1, 2, 3 and 4 under a query of 1, pooled by 3 with zeros beyond the edges."""
    context = LayerContext(
        layer_idx=0,
        num_layers=1,
        queries=torch.ones(1, 1, 1, 1),
        keys=torch.tensor([[[[9.0], [1.0], [2.0], [3.0], [4.0]]]]),
        values=torch.zeros(1, 1, 5, 1),
        positions=torch.tensor([[[-1, 0, 1, 2, 3]]]),
        new_valid=torch.tensor([[False, True, True, True, True]]),
        seen_len=(4,),
        attention=AttentionSettings(0.01),
    )
    saliency = LastQueryProductScorer(kernel_size=3).score(context)[0, 0, 1:]
    assert torch.allclose(saliency, torch.tensor([3.0, 6.0, 9.0, 7.0]) / 3)


@pytest.mark.parametrize(
    ("num_layers", "filter_layer", "rate", "computed"),
    [(32, 13, 0.1, 0.51), (32, 13, 0.2, 0.61), (36, 17, 0.1, 0.57), (36, 17, 0.2, 0.67)],
)
def test_prefill_compute_rate(
    num_layers: int, filter_layer: int, rate: float, computed: float
) -> None:
    policy = GemFilter(filter_layer=filter_layer, retention_rate=rate)
    assert round(policy.prefill_compute_rate(num_layers), 2) == computed


# Positions that are learned and not rotated; indexers, some of them beside states.
NAMES = (
    *("bert", "roberta", "gpt2", "opt"),
    *("deepseek_v32", "hy_v4", "qwen4_exp_text", "glm5_next"),
)


REFUSED = {"qwen4_exp_text"} if OLD else set()  # see `test_indexed`


@pytest.mark.parametrize("name", sorted(({*NAMES} & {*builds()}) - REFUSED))
def test_an_answer_is_that_to_the_chosen_tokens(name: str) -> None:
    """Of what else the first pass has made, as index keys, nothing stays."""
    model, cache = builds()[name].model(), PolicyCache(GemFilter(retention_rate=0.3))
    answer = tokens_of(model, prompt(40), cache)
    (chosen,) = cache.propagated.values()
    alone = tokens_of(model, prompt(40)[:, chosen[0]], DynamicCache(config=model.config))
    assert len(chosen[0]) == 12
    assert answer == alone
    for layer in cache.layers:
        if getattr(layer, "index", None) is not None:
            assert layer.index.shape[2] == layer.kept_len == 12 + 6
