"""The weights of output projections: found on the layer, whatever they are held in."""

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, LayerContext
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.model.layer_trial import LayerTrial
from kvpolicy.policies import GQAGroupSelector, PassAllPropagation, TokenSelectivePropagation
from tests.families import FAMILIES
from tests.integrations.support.asking import OutputScorer
from tests.integrations.support.conversation import left_padded
from tests.reference import random_tokens

# By family, the projection of a decoder layer.
PROJECTIONS = {
    "llama": "self_attn.o_proj",
    "qwen3": "self_attn.o_proj",
    "phi": "self_attn.dense",
    "gpt_neox": "attention.dense",
    "gpt2": "attn.c_proj",
    "opt": "self_attn.out_proj",
    "gemma3": "self_attn.o_proj",
    "gpt_oss": "self_attn.o_proj",
    "deepseek_v2": "self_attn.o_proj",
    "qwen3_next": "self_attn.o_proj",  # behind a gate
    "lfm2": "self_attn.out_proj",
}


@attrs.frozen
class Noting(OutputScorer):
    """Notes the weights that it is shown."""

    shown: dict[int, Tensor] = attrs.field(factory=dict)

    def score(self, context: LayerContext) -> Tensor:
        assert context.layer.output_weight is not None
        self.shown[context.layer_idx] = context.layer.output_weight
        assert context.layer.output_weight.shape[:2] == (
            context.query_heads,
            context.values.shape[3],
        )
        return super().score(context)


def layers_of(model: PreTrainedModel) -> Any:
    decoder = model.get_decoder()
    return decoder.layers if hasattr(decoder, "layers") else model.transformer.h


def read(model: PreTrainedModel, policy: CachePolicy) -> PolicyCache:
    ids, mask = left_padded([random_tokens(row, length) for row, length in enumerate((40, 31))])
    cache = PolicyCache(policy)
    with torch.no_grad(), cache.attached(model):
        model(ids, attention_mask=mask, cache=cache)
    return cache


def shown_of(model: PreTrainedModel) -> dict[int, Tensor]:
    scorer = Noting()
    drop = TokenSelectivePropagation(tsp_rate=0.6)
    read(model, CachePolicy(scorer, GQAGroupSelector(0.5), drop))
    return scorer.shown


@pytest.mark.parametrize("name", PROJECTIONS)
def test_what_heads_give_times_the_weights_is_the_projection(name: str) -> None:
    """But for its bias, whatever module it is."""
    model = FAMILIES[name].build(seed=1)
    shown = shown_of(model)
    assert shown
    for index, weight in shown.items():
        module = layers_of(model)[index].get_submodule(PROJECTIONS[name])
        outputs = torch.randn(5, *weight.shape[:2])
        with torch.no_grad():
            wanted = module(outputs.flatten(1)) - module(torch.zeros_like(outputs.flatten(1)))
        found = torch.einsum("nhv,hvd->nd", outputs, weight)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_plain_weights_are_not_copied(name: str) -> None:
    model = FAMILIES[name].build(seed=1)
    for index, weight in shown_of(model).items():
        module = layers_of(model)[index].get_submodule(PROJECTIONS[name])
        assert weight.data_ptr() == module.weight.data_ptr()
        assert not weight.requires_grad


class InInt8(nn.Module):
    """A matrix held as integers and a scale for each output, as quantised ones are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        weight = linear.weight.detach()
        self.scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), False)
        self.bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.weight.to(hidden.dtype) * self.scale.to(hidden.dtype)
        return nn.functional.linear(hidden, weight, self.bias)


def test_quantised_weights_are_read_off_the_module() -> None:
    model = FAMILIES["llama"].build(seed=1)
    for layer in layers_of(model):
        layer.self_attn.o_proj = InInt8(layer.self_attn.o_proj)
    for index, weight in shown_of(model).items():
        module = layers_of(model)[index].self_attn.o_proj
        wanted = (module.weight.float() * module.scale).T.reshape(weight.shape)
        torch.testing.assert_close(weight, wanted)


def test_a_norm_in_between_is_refused() -> None:
    model = FAMILIES["llama"].build(seed=1)
    for layer in layers_of(model):
        width = layer.self_attn.o_proj.in_features
        layer.self_attn.o_proj = nn.Sequential(nn.LayerNorm(width), layer.self_attn.o_proj)
    policy = CachePolicy(OutputScorer(), GQAGroupSelector(0.5), PassAllPropagation())
    with pytest.raises(UnsupportedModelError, match="no projection of layer 0 takes its heads'"):
        read(model, policy)
    before = sum(len(each._forward_pre_hooks) for each in model.modules())
    assert before == 0


def test_hooks_are_gone_and_the_model_is_as_it_was() -> None:
    model = FAMILIES["llama"].build(seed=1)
    configs = [layer.self_attn.config for layer in layers_of(model)]
    read(model, CachePolicy(OutputScorer(), GQAGroupSelector(0.5), PassAllPropagation()))
    assert all(
        not each._forward_pre_hooks and not each._forward_hooks
        for layer in layers_of(model)
        for each in layer.modules()
    )
    assert all(
        layer.self_attn.config is config
        for layer, config in zip(layers_of(model), configs, strict=True)
    )


def test_nothing_is_tried_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LayerTrial, *args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(LayerTrial, "_run", fail)
    model = FAMILIES["llama"].build(seed=1)
    scorer = type("Undeclared", (Noting,), {"needs_output_weight": False, "score": _lengths})()
    read(model, CachePolicy(scorer, GQAGroupSelector(0.5), PassAllPropagation()))
    with pytest.raises(AssertionError):
        read(model, CachePolicy(Noting(), GQAGroupSelector(0.5), PassAllPropagation()))


def _lengths(scorer: Noting, context: LayerContext) -> Tensor:
    assert (context.layer.history, context.layer.rotary, context.layer.output_weight) == (
        (),
        None,
        None,
    )
    return context.values.float().norm(dim=-1)


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_in_the_weights() -> None:
    peft = pytest.importorskip("peft")
    model = FAMILIES["llama"].build(seed=1)
    plain = shown_of(model)
    # Modules are replaced in place.
    peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["o_proj"], r=2, init_lora_weights=False)
    )
    for index, weight in shown_of(model).items():
        added = layers_of(model)[index].self_attn.o_proj.get_delta_weight("default").detach()
        assert added.abs().max() > 0.1
        torch.testing.assert_close(weight, plain[index] + added.T.reshape(weight.shape))
