"""What a cache holds for recurrent layers: copied, saved, reordered, undone, counted."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.state.recurrent import (
    EmptyLayer,
    RecurrentLayer,
    SideBySideLayer,
)
from kvpolicy.policies import FastKV, SnapKV
from tests.integrations.hybrids.models import (
    KINDS,
    generate,
    hybrid,
    padded,
    same,
    states_of,
    tokens,
)

ROWS = [tokens(0, 47), tokens(1, 31)]
POLICY = FastKV(tsp_rate=0.5, retention_rate=0.3, window_size=4)


def read(name: str, rows: list[list[int]]) -> tuple[PolicyCache, Tensor]:
    """A cache that has read rows and decoded four tokens, and the whole of the conversation."""
    cache = PolicyCache(POLICY)
    said, _ = generate(hybrid(name), cache, *padded(rows))
    return cache, said


BROKEN: dict[str, dict[str, Any]] = {
    "states must be JSON": {"states": "{"},
    "states must map layers to numbers and names": {"states": '{"0": 0}'},
    "states must map layers to numbers and": {"states": '{"0": {"number": 1, "held": ["conv.1"]}}'},
    "states must map layers to numbers": {"states": '{"0": {"number": 1, "held": []}}'},
    "states must be of layers 0 to 3, got layers .'4'": {
        "states": '{"4": {"number": 1, "held": ["conv.0"]}}'
    },
    "lacks 'layers.1.conv.0'": {"states": '{"1": {"number": 1, "held": ["conv.0"]}}'},
    "layers.0.conv.0 must be something that its layer holds": {
        "states": '{"2": {"number": 1, "held": ["conv.0", "recurrent.0"]}}'
    },
    "lacks 'layers.0.conv.1'": {"states": '{"0": {"number": 2, "held": ["conv.1"]}}'},
    "layers.0.conv.0 must be of floats, of shape": {"layers.0.conv.0": torch.zeros(1, 2).long()},
    "layers.0.recurrent.0 must be of floats": {"layers.0.recurrent.0": torch.zeros(3, 2)},
    "layers.0.keys must be something that its layer holds": {"layers.0.keys": torch.zeros(1, 2)},
    "layers.1.conv.0 must be something": {"layers.1.conv.0": torch.zeros(1, 2)},
    "query_heads must have an entry for each layer": {"layers.7.conv.0": torch.zeros(1, 2)},
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_file_whose_states_do_not_fit(message: str, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    read("qwen3_next", ROWS[:1])[0].save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118
    held = {"number": 1, "held": ["conv.0", "recurrent.0"]}
    assert json.loads(metadata["states"]) == {"0": held, "2": held}
    for part, value in BROKEN[message].items():
        (metadata if isinstance(value, str) else tensors)[part] = value
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=message):
        PolicyCache.load(path)


def test_a_file_without_a_states_layer_is_no_file_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    read("qwen3_next", ROWS[:1])[0].save(path)
    with safe_open(path, framework="pt") as file:
        metadata = {name: each for name, each in file.metadata().items() if name != "states"}
        tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118
    kept = {name: each for name, each in tensors.items() if not _is_state(name)}
    save_file(kept, path, metadata)
    cache = PolicyCache.load(path)
    message = "must hold what layer 0 of the model holds .kind: recurrent"
    with pytest.raises(ValueError, match=message), cache.attached(hybrid("qwen3_next")):
        pass


def _is_state(name: str) -> bool:
    return ".conv." in name or ".recurrent." in name


def test_a_saved_state_in_another_precision_is_refused(tmp_path: Path) -> None:
    read("lfm2", ROWS[:1])[0].save(tmp_path / "cache")
    cache = PolicyCache.load(tmp_path / "cache")
    coarse = copy.deepcopy(hybrid("lfm2")).to(torch.bfloat16)
    fine = copy.deepcopy(coarse).to(torch.float32)
    fine.load_state_dict(hybrid("lfm2").state_dict())
    with pytest.raises(ValueError, match="model must have the precision"), cache.attached(coarse):
        pass
    with cache.attached(fine):
        pass


@pytest.mark.parametrize("name", KINDS)
def test_beams_are_those_of_the_models_own_cache(name: str) -> None:
    model, ids = hybrid(name), torch.tensor(ROWS[:1])
    common = {"max_new_tokens": 5, "do_sample": False, "num_beams": 3, "pad_token_id": 0}
    own = model.generate(ids, attention_mask=torch.ones_like(ids), **common)
    cache = PolicyCache(SnapKV(1.0, window_size=4))
    found = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **common)
    assert torch.equal(found, own)


class Broken(Exception):  # noqa: N818
    pass


def fail(*_: Any) -> None:
    raise Broken


def test_a_failure_behind_the_decoder_is_undone() -> None:
    model, cache = hybrid("qwen3_next"), PolicyCache(POLICY)
    head: nn.Module = model.get_output_embeddings()
    with torch.no_grad(), cache.attached(model):
        model(torch.tensor(ROWS[:1]), cache=cache)
        before = states_of(cache)
        handle = head.register_forward_hook(fail)
        with pytest.raises(Broken):
            model(torch.tensor([[5]]), cache=cache)
        handle.remove()
    assert same(states_of(cache), before)
    assert cache.get_seq_length() == 47


@pytest.mark.parametrize("name", KINDS)
def test_states_count_as_held_and_as_what_a_full_cache_holds(name: str) -> None:
    cache, _ = read(name, ROWS)
    report = cache.report()
    for layer, row in zip(cache.layers, report.layers, strict=True):
        assert row.holds_tokens is layer.attends
        if isinstance(layer, SideBySideLayer):
            own = sum(each.nbytes for part in layer.states for each in part.values())
            assert layer.keys is not None
            assert layer.values is not None
            # Rows keep unlike numbers of tokens: keys and values are read padded, held without it.
            filled = int((layer.positions >= 0).sum())
            slots = layer.positions.numel()
            padded_bytes = layer.keys.nbytes + layer.values.nbytes
            assert row.held_bytes == own + padded_bytes * filled // slots
            assert own < row.held_bytes < row.full_bytes
        elif isinstance(layer, RecurrentLayer):
            own = sum(each.nbytes for part in layer.states for each in part.values())
            assert row.held_bytes == row.full_bytes == own > 0
            assert (layer.keys, layer.values, layer.positions) == (None, None, None)
        elif isinstance(layer, EmptyLayer):
            assert row.held_bytes == row.full_bytes == 0
        else:
            assert row.held_bytes < row.full_bytes
    kept = [row.kept for row in report.layers if row.holds_tokens]
    assert report.total.kept == sum(kept) / len(kept)
    assert (str(report).splitlines()[1].split()[2] == "-") is not cache.layers[0].attends


@pytest.mark.parametrize("name", KINDS)
def test_a_reset_cache_is_as_new(name: str) -> None:
    model, (ids, mask) = hybrid(name), padded(ROWS)
    cache, _ = read(name, [tokens(4, 38)])
    cache.reset()
    assert all(not layer.state_nbytes() for layer in cache.layers)
    _, want = generate(model, PolicyCache(POLICY), ids, mask)
    _, found = generate(model, cache, ids, mask)
    assert torch.equal(found, want)
