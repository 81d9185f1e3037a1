"""Models whose modules' forwards accelerate has replaced, as ``device_map`` has it do."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from tests.integrations.support.conversation import METHODS, run_conversation
from tests.reference import random_tokens, tiny_model

pytest.importorskip("accelerate")
from accelerate import cpu_offload, disk_offload, dispatch_model

# Older releases of Transformers take offloaded weights, on no device yet, for the model's device.
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")

CPU = torch.device("cpu")
Place = Callable[[PreTrainedModel, Path], PreTrainedModel]


def on_cpu(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return dispatch_model(model, {"": "cpu"}, force_hooks=True, skip_keys=CACHE)


def half_on_disk(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{index}": ("cpu", "disk")[index % 2] for index in range(4)}
    return dispatch_model(model, {**places, "lm_head": "disk"}, offload_dir=folder, skip_keys=CACHE)


def all_on_disk(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    disk_offload(model, folder, execution_device=CPU)
    return model


def offloaded(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    return cpu_offload(model, execution_device=CPU, offload_buffers=True)


def whole_layers_offloaded(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A layer's weights are all loaded before it runs, and unloaded after."""
    return cpu_offload(model, execution_device=CPU, preload_module_classes=["LlamaDecoderLayer"])


PLACES: dict[str, Place] = {
    each.__name__: each
    for each in (on_cpu, half_on_disk, all_on_disk, offloaded, whole_layers_offloaded)
}


def on_meta(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


@pytest.mark.parametrize("method", ["snapkv", "fastkv", "gemfilter", "pyramidinfer"])
@pytest.mark.parametrize("place", PLACES)
def test_two_turns_give_what_they_give_without_hooks(
    tmp_path: Path, place: str, method: str
) -> None:
    model = tiny_model("llama", seed=1)
    policy, _ = METHODS[method]
    _, expected = run_conversation(model, policy, (0, 1))
    placed = PLACES[place](copy.deepcopy(model), tmp_path)
    away = on_meta(placed)
    assert bool(away) == (place != "on_cpu")
    _, found = run_conversation(placed, policy, (0, 1))
    for turn, wanted in zip(found, expected, strict=True):
        assert torch.equal(turn.logits, wanted.logits)
        assert turn.kept == wanted.kept
        assert turn.propagated == wanted.propagated
    assert on_meta(placed) == away
    without: Any = placed.generate(
        torch.tensor([random_tokens(5, 30)]), max_new_tokens=5, do_sample=False
    )
    again: Any = model.generate(
        torch.tensor([random_tokens(5, 30)]), max_new_tokens=5, do_sample=False
    )
    assert torch.equal(without, again)


@pytest.mark.parametrize("place", ["offloaded", "whole_layers_offloaded"])
def test_the_decoder_alone_may_carry_the_outermost_hook(tmp_path: Path, place: str) -> None:
    """Then a pass that restarts ends inside of it as well."""

    def states(decoder: Any, ids: Tensor) -> Tensor:
        cache = PolicyCache(METHODS["gemfilter"][0])
        with torch.no_grad(), cache.attached(decoder):
            hidden: Tensor = decoder(ids, cache=cache).last_hidden_state
            step: Tensor = decoder(ids[:, :1], cache=cache).last_hidden_state
        return torch.cat([hidden, step], dim=1)

    decoder = tiny_model("llama", seed=1).model
    ids = torch.tensor([random_tokens(0, 60)])
    placed = PLACES[place](copy.deepcopy(decoder), tmp_path)
    away = on_meta(placed)
    assert torch.equal(states(placed, ids), states(decoder, ids))
    assert on_meta(placed) == away


def test_a_saved_cache_goes_on_with_a_model_that_is_offloaded(tmp_path: Path) -> None:
    model = offloaded(tiny_model("llama", seed=1), tmp_path)
    ids = torch.tensor([random_tokens(0, 60)])
    cache = PolicyCache(METHODS["fastkv"][0])
    said: Any = model.generate(ids, cache=cache, max_new_tokens=5, do_sample=False)
    cache.save(tmp_path / "cache.safetensors")
    whole = torch.cat([said, torch.tensor([random_tokens(7, 20)])], dim=1)
    found: list[Any] = [
        model.generate(whole, cache=each, max_new_tokens=5, do_sample=False)
        for each in (cache, PolicyCache.load(tmp_path / "cache.safetensors"))
    ]
    assert torch.equal(found[0], found[1])
