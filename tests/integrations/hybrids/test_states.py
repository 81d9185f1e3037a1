"""What a cache holds for recurrent layers: copied, saved, reordered, undone, counted."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvpolicy.integrations.transformers import OffloadedStorage, PlainStorage, PolicyCache
from kvpolicy.integrations.transformers.state.recurrent import (
    EmptyLayer,
    RecurrentLayer,
    SideBySideLayer,
)
from kvpolicy.integrations.transformers.state.storage import Storage
from kvpolicy.policies import FastKV, SnapKV
from tests.integrations.hybrids.models import KINDS, generate, hybrid, same, states_of, tokens
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.support.conversation import left_padded

ROWS = [tokens(0, 47), tokens(1, 31)]
POLICY = FastKV(tsp_rate=0.5, retention_rate=0.3, window_size=4)


def read(name: str, rows: list[list[int]]) -> tuple[PolicyCache, Tensor]:
    """A cache that has read rows and decoded four tokens, and the whole of the conversation."""
    cache = PolicyCache(POLICY)
    said, _ = generate(hybrid(name), cache, *left_padded(rows))
    return cache, said


# Every kind of layer of a cache: beside states, an indexer, keys of another layer, or windows.
SAVED = ("qwen3_next", "falcon_h1", "nemotron_h", "deepseek_v32", "minimax_m3_vl", "gemma3_text")


@pytest.mark.parametrize("name", [each for each in (*SAVED, "gemma4_text") if each in builds()])
@pytest.mark.parametrize("storage", [PlainStorage(), OffloadedStorage()], ids=str)
def test_a_file_has_all_that_layers_hold(name: str, storage: Storage, tmp_path: Path) -> None:
    model, cache = builds()[name].model(), PolicyCache(SnapKV(0.4, window_size=4), storage)
    said, _ = generate(model, cache, torch.tensor(ROWS[:1]))
    cache.save(tmp_path / "cache")
    loaded = PolicyCache.load(tmp_path / "cache", storage=storage)
    more = torch.cat([said, torch.tensor([tokens(3, 9)])], dim=1)
    found = [generate(model, each, more) for each in (loaded, cache)]
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    for one, other in zip(loaded.layers, cache.layers, strict=True):
        assert type(one) is type(other)
        assert one.settings() == other.settings()
        held = [layer.tensors() for layer in (one, other)]
        assert held[0].keys() == held[1].keys()
        assert all(torch.equal(held[0][part], held[1][part]) for part in held[0])
    assert str(loaded.report()) == str(cache.report())


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
            own = sum(each.nbytes for each in layer.beside().values())
            assert layer.keys is not None
            assert layer.values is not None
            # Rows keep unlike numbers of tokens: keys and values are read padded, held without it.
            filled = int((layer.positions >= 0).sum())
            slots = layer.positions.numel()
            padded_bytes = layer.keys.nbytes + layer.values.nbytes
            assert row.held_bytes == own + padded_bytes * filled // slots
            assert own < row.held_bytes < row.full_bytes
        elif isinstance(layer, RecurrentLayer):
            own = sum(each.nbytes for each in layer.beside().values())
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
    model, (ids, mask) = hybrid(name), left_padded(ROWS)
    cache, _ = read(name, [tokens(4, 38)])
    cache.reset()
    assert all(not layer.state_nbytes() for layer in cache.layers)
    _, want = generate(model, PolicyCache(POLICY), ids, mask)
    _, found = generate(model, cache, ids, mask)
    assert torch.equal(found, want)
