"""The model that filled a saved cache is known again however it is loaded, and no other one is."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.state.fingerprint import ModelFingerprint
from kvpolicy.policies import SnapKV
from tests.integrations.support.conversation import prompt
from tests.integrations.support.reading import read
from tests.reference import tiny_model

MESSAGE = "model must be the one that filled the saved cache, got another one: "


def filled(model: PreTrainedModel, path: Path) -> PolicyCache:
    cache, _ = read(model, SnapKV(0.4), prompt(60))
    cache.save(path / "cache")
    return PolicyCache.load(path / "cache")


def next_logits(model: PreTrainedModel, cache: PolicyCache) -> Tensor:
    with torch.no_grad(), cache.attached(model):
        logits: Tensor = model(prompt(3, seed=2), cache=cache).logits
    return logits.float()


def offloaded(model: PreTrainedModel) -> PreTrainedModel:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model, torch.device("cpu"))  # type: ignore[no-any-return]


def by_quanto(model: PreTrainedModel) -> PreTrainedModel:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8, exclude="lm_head")
    quanto.freeze(model)
    return model


def by_torchao(model: PreTrainedModel) -> PreTrainedModel:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


# In what a model may be loaded, and how far its logits are then from those in float32 (of several,
# the median).
WAYS: dict[str, tuple[Callable[[PreTrainedModel], Any], float]] = {
    "float16": (lambda model: model.half(), 0.02),
    "bfloat16": (lambda model: model.bfloat16(), 0.15),
    "through bfloat16": (lambda model: model.bfloat16().float(), 0.15),
    "float64": (lambda model: model.double(), 1e-3),
    "offloaded": (offloaded, 1e-4),
    "quanto": (by_quanto, 0.15),
    "torchao": (by_torchao, 0.15),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_weights_loaded_in_another_way(
    model: PreTrainedModel, tmp_path: Path, way: str
) -> None:
    load, apart = WAYS[way]
    other = load(copy.deepcopy(model))
    expected = next_logits(model, filled(model, tmp_path))
    got = next_logits(other, filled(model, tmp_path))
    assert float((got - expected).abs().median()) < apart
    again = next_logits(model, filled(other, tmp_path))
    assert float((again - expected).abs().median()) < apart


@pytest.mark.parametrize("way", ["float16", "bfloat16", "offloaded", "quanto", "torchao"])
def test_other_weights_loaded_in_that_way(model: PreTrainedModel, tmp_path: Path, way: str) -> None:
    load, _ = WAYS[way]
    other = load(tiny_model("llama", seed=2))
    with pytest.raises(ValueError, match=MESSAGE + "the values of embed_tokens.weight differ"):
        next_logits(other, filled(model, tmp_path))
    with pytest.raises(ValueError, match=MESSAGE + "the values of embed_tokens.weight differ"):
        next_logits(model, filled(other, tmp_path))


@torch.no_grad()
@pytest.mark.parametrize("load", [lambda model: model, WAYS["offloaded"][0]])
def test_a_model_of_which_one_matrix_is_another(
    model: PreTrainedModel, tmp_path: Path, load: Any
) -> None:
    """As of a fine-tuned model, whose embeddings and norms may be the same."""
    other = copy.deepcopy(model)
    other.model.layers[3].mlp.down_proj.weight *= 1.01
    with pytest.raises(ValueError, match="the values of layers.3.mlp.down_proj.weight differ"):
        next_logits(load(other), filled(model, tmp_path))


def test_another_configuration(model: PreTrainedModel, tmp_path: Path) -> None:
    other = copy.deepcopy(model)
    other.config.rope_parameters = {**other.config.rope_parameters, "rope_theta": 5e5}
    with pytest.raises(ValueError, match=MESSAGE + "rope_parameters of its config was .*10000"):
        next_logits(other, filled(model, tmp_path))
    other = copy.deepcopy(model)
    other.config.use_cache, other.config.eos_token_id = True, 3
    next_logits(other, filled(model, tmp_path))


def test_another_size(model: PreTrainedModel, tmp_path: Path) -> None:
    other = tiny_model("llama", seed=1, intermediate_size=88)
    with pytest.raises(ValueError, match=MESSAGE + "intermediate_size of its config was 80"):
        next_logits(other, filled(model, tmp_path))


def test_more_parameters(model: PreTrainedModel, tmp_path: Path) -> None:
    other = copy.deepcopy(model)
    other.model.layers[1].mlp.extra = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="only the other has a parameter layers.1.mlp.extra"):
        next_logits(other, filled(model, tmp_path))
    with pytest.raises(ValueError, match="only the one has a parameter layers.1.mlp.extra"):
        next_logits(model, filled(other, tmp_path))


def test_where_nothing_can_be_compared(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = filled(model, tmp_path)
    nowhere = copy.deepcopy(model).to("meta")
    with (
        pytest.warns(UserWarning, match="it cannot be checked .* since no parameter's values"),
        cache.attached(nowhere),
    ):
        pass


def test_rounding_is_not_another_value() -> None:
    values = torch.randn(4000) * torch.logspace(-6, 2, 4000)
    prints = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        module = torch.nn.Linear(4000, 1, bias=False)
        module.weight.data = values[None].to(dtype)
        module.config = tiny_model("llama", seed=1).config  # type: ignore[assignment]
        prints[dtype] = ModelFingerprint.of(module)
    for one in prints.values():
        for other in prints.values():
            assert one.difference(other) is None
    module.weight.data = (values * (1 + 2**-6))[None].to(torch.bfloat16)
    for one in prints.values():
        assert one.difference(ModelFingerprint.of(module)) == "the values of weight differ"
