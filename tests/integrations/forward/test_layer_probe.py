"""Policies that turn keys, or read output weights, against the slow reference, and decoding."""

import copy
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, DecodingEviction, LayerContext
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    Compactor,
    ExpectedAttention,
    GQAGroupSelector,
    KeepAllSelector,
    PassAllPropagation,
    WindowMaxPoolScorer,
)
from tests.integrations.support.asking import OutputScorer, TurnedBackScorer
from tests.integrations.support.conversation import FIRST_LENS, assert_as_reference
from tests.reference import Method, random_tokens, tiny_model
from tests.reference.asking import Outputs, TurnedBack
from tests.reference.decoder import decoder_layers, geometry

ROWS = tuple(range(len(FIRST_LENS)))
SELECTOR = GQAGroupSelector(0.3, window_size=4)


def weights_of(model: PreTrainedModel) -> tuple[Tensor, ...]:
    return tuple(layer.self_attn.o_proj.weight.detach() for layer in decoder_layers(model))


def case(name: str, model: PreTrainedModel) -> tuple[CachePolicy, Method]:
    if name == "turning":
        theta = geometry(model).rope_theta
        return (
            CachePolicy(TurnedBackScorer(), SELECTOR, PassAllPropagation()),
            TurnedBack(0.3, window_size=4, rope_theta=theta),
        )
    return (
        CachePolicy(OutputScorer(), SELECTOR, PassAllPropagation()),
        Outputs(0.3, window_size=4, weights=weights_of(model)),
    )


@pytest.mark.parametrize("name", ["turning", "weighing"])
@pytest.mark.parametrize("rows", [(0,), ROWS], ids=["single", "padded"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_against_the_reference(family: Any, rows: tuple[int, ...], name: str) -> None:
    model = tiny_model(family, seed=3)
    policy, method = case(name, model)
    assert_as_reference(model, policy, method, rows)


@pytest.mark.parametrize("size", [13, 50])
@pytest.mark.parametrize("name", ["turning", "weighing"])
def test_a_prompt_in_chunks(name: str, size: int) -> None:
    model = tiny_model("llama", seed=3)
    policy, _ = case(name, model)
    ids = torch.tensor([random_tokens(0, 50)])
    kept = []
    for length in (size, 50):
        cache = PolicyCache(policy)
        with torch.no_grad(), cache.attached(model):
            cache.start_turn(prompt_len=50)
            for start in range(0, 50, length):
                model(ids[:, start : start + length], cache=cache)
        kept.append([layer.positions for layer in cache.layers])
    assert all(torch.equal(*pair) for pair in zip(*kept, strict=True))


@attrs.frozen
class Checking(TurnedBackScorer):
    """Holds what it is shown of a token against what it was shown before."""

    seen: dict[tuple[int, int, int], Tensor] = attrs.field(factory=dict)
    choices: list[int] = attrs.field(factory=list)

    @property
    def needs_output_weight(self) -> bool:
        return True

    def score(self, context: LayerContext) -> Tensor:
        assert context.layer.rotary is not None
        assert context.layer.output_weight is not None
        assert context.layer.output_weight.shape == (6, 8, 48)
        back = context.layer.rotary.turned_back(context.keys, context.positions)
        for head, slot in context.valid[0].nonzero().tolist():
            at = (context.layer_idx, head, int(context.positions[0, head, slot]))
            known = self.seen.setdefault(at, back[0, head, slot])
            torch.testing.assert_close(back[0, head, slot], known, atol=1e-4, rtol=1e-4)
        self.choices.append(context.layer_idx)
        return super().score(context)


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
def test_while_decoding(fixed: bool) -> None:
    """Choices among an answer's tokens are made with the same, in buffers of either kind."""
    model, scorer = tiny_model("llama", seed=3), Checking()
    rule = DecodingEviction(scorer, GQAGroupSelector(retention_tokens=20, window_size=2), every=4)
    plain = attrs.evolve(rule, scorer=TurnedBackScorer())
    prompt = torch.tensor([random_tokens(0, 30)])
    said = []
    for each in (rule, plain):
        policy = CachePolicy(None, KeepAllSelector(), PassAllPropagation(), decoding=each)
        cache = PolicyCache(policy, max_new_tokens=12 if fixed else None)
        said.append(model.generate(prompt, cache=cache, max_new_tokens=12, do_sample=False))
        assert max(layer.kept_len for layer in cache.layers) <= 24
    assert torch.equal(*said)
    assert scorer.choices.count(0) == 2


@pytest.mark.parametrize("name", ["turning", "weighing"])
def test_growing_and_fixed_buffers_say_the_same(name: str) -> None:
    model = tiny_model("llama", seed=3)
    scorer = TurnedBackScorer() if name == "turning" else OutputScorer()
    selector = GQAGroupSelector(retention_tokens=20, window_size=2)
    policy = CachePolicy(
        scorer, selector, PassAllPropagation(), decoding=DecodingEviction(scorer, selector, every=3)
    )
    prompt = torch.tensor([random_tokens(0, 40)])
    found = []
    for count in (None, 14):
        cache = PolicyCache(policy, max_new_tokens=count)
        said = model.generate(prompt, cache=cache, max_new_tokens=14, do_sample=False)
        found.append((said, [layer.positions for layer in cache.layers]))
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(one, other)


def test_a_copy_and_a_loaded_cache_go_on(tmp_path: Any) -> None:
    """A choice that is due first in a copy is made there as in the original."""
    model, scorer = tiny_model("llama", seed=3), Checking()
    rule = DecodingEviction(scorer, GQAGroupSelector(retention_tokens=20, window_size=2), every=4)
    cache = PolicyCache(CachePolicy(None, KeepAllSelector(), PassAllPropagation(), decoding=rule))
    steps = torch.tensor([random_tokens(1, 8)])
    with torch.no_grad(), cache.attached(model):
        model(torch.tensor([random_tokens(0, 30)]), cache=cache)
        model(steps[:, :3], cache=cache)
    cache.save(tmp_path / "cache")
    others = [copy.deepcopy(cache), PolicyCache.load(tmp_path / "cache", cache.policy), cache]
    found = []
    for each in others:
        with torch.no_grad(), each.attached(model):
            model(steps[:, 3:4], cache=each)
            logits = model(steps[:, 4:5], cache=each).logits
        found.append((logits, [layer.positions for layer in each.layers]))
    for logits, positions in found[1:]:
        torch.testing.assert_close(logits, found[0][0])
        assert all(torch.equal(*pair) for pair in zip(positions, found[0][1], strict=True))
    assert found[0][1][0].shape[2] == 21


@pytest.mark.parametrize(
    "policy",
    [
        ExpectedAttention(0.5),
        Compactor(0.5),
        CachePolicy(WindowMaxPoolScorer(4), SELECTOR, PassAllPropagation(), gapless=True),
    ],
    ids=["ExpectedAttention", "Compactor", "gapless"],
)
@pytest.mark.parametrize(
    ("name", "value", "layer"),
    [("layers.0.mlp.up_proj", torch.nan, 1), ("layers.2.self_attn.k_proj", torch.inf, 2)],
)
def test_a_model_that_computes_no_numbers(
    policy: CachePolicy, name: str, value: float, layer: int
) -> None:
    """It is not for its rotary embedding that nothing can be found out."""
    model, cache = tiny_model("llama", seed=3), PolicyCache(policy)
    weight, prompt = model.model.get_submodule(name).weight, torch.tensor([random_tokens(0, 30)])
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0] = value
    with pytest.raises(ValueError, match=f"finite numbers, but queries or keys of layer {layer} "):
        model.generate(prompt, cache=cache, max_new_tokens=2)
    with torch.no_grad():
        weight.copy_(before)
    model.generate(prompt, cache=cache, max_new_tokens=2)
    assert cache.get_seq_length() == 31
