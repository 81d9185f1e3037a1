"""Chunked attention: chunks in original positions, and queries scaled by theirs.

Every family of `make families` is held against its own dense attention there.
"""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import OffloadedStorage, PolicyCache
from kvpolicy.integrations.transformers.model.kinds import ChunkedAttention, FullAttention
from kvpolicy.integrations.transformers.model.masks import Chunk, Visibility, first_seen
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.model.temperature import Temperature
from kvpolicy.policies import FastKV, FullContext, GemFilter, SnapKV
from tests.integrations.hybrids.models import apart, generate, padded, tokens
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.model.builds.dense import decoder_layers, dense_logits
from tests.integrations.model.builds.judge import seen_by
from tests.integrations.model.builds.sizes import WINDOW
from tests.integrations.support.read_twice import read_two_turns
from tests.integrations.test_generation import CHUNKS_GO_ON, assert_same_state

ROWS = [tokens(0, 47), tokens(1, 31)]
POLICIES: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "snapkv": SnapKV(0.35, window_size=4),
    "fastkv": FastKV(tsp_layer=1, tsp_rate=0.6, retention_rate=0.35, window_size=4),
}
SNAPKV = POLICIES["snapkv"]
TOLERANCE = 1e-4


@cache
def chunked(implementation: str = "sdpa") -> PreTrainedModel:
    """Chunks in layers 0 and 2; in the others everything, without positions."""
    return builds()["llama4_text_mixed"].model(attn_implementation=implementation)


def goes_on(sequences: Tensor) -> tuple[Tensor, Tensor]:
    """What was said of both rows, and a few tokens more."""
    more = torch.tensor([tokens(7 + row, 9) for row in range(2)])
    mask = torch.ones(2, sequences.shape[1] + 9, dtype=torch.int64)
    mask[1, :16] = 0
    return torch.cat([sequences, more], dim=1), mask


def test_what_the_model_is_taken_for() -> None:
    parts = ModelParts(chunked())
    kinds = [ChunkedAttention, FullAttention] * 2
    assert [type(kind) for kind in parts.kinds] == kinds
    assert parts.eligible == [1, 3]
    assert parts.windows == [WINDOW, None] * 2
    assert parts.temperatures == [None, Temperature(0.3, 8.0)] * 2


def test_a_chunk_by_hand() -> None:
    places = torch.arange(6)
    assert first_seen(places, Chunk(3)).tolist() == [0, 0, 0, 3, 3, 3]
    assert first_seen(places, 3).tolist() == [-2, -1, 0, 1, 2, 3]
    keys = torch.tensor([[[-1, 1, 2, 3, 5]]])
    seen = Visibility(keys, torch.tensor([[2, 3, 5]]), 1, Chunk(3)).mask("sdpa", torch.float32)
    assert isinstance(seen, Tensor)
    assert seen[0, 0].int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


def test_a_temperature_by_hand() -> None:
    """Scaled for positions 2 and 3, at positions 7 and 0."""
    hot = Temperature(0.5, 4.0)
    found = hot.corrected(torch.ones(1, 1, 2, 1), 2, torch.tensor([[7, 0]]))
    at_7, at_3 = (1 + 0.5 * torch.tensor(1.0 + times).log() for times in (2, 1))
    torch.testing.assert_close(found[0, 0, :, 0], torch.stack([at_7, 1 / at_3]))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [15, 16, 17, 32, 47, 48])
def test_at_every_place_in_a_chunk(length: int, policy: str, implementation: str) -> None:
    """Alone and beside a longer row: what is held is what the next token's chunk has so far."""
    model, row = chunked(implementation), tokens(2, length)
    for rows in ([row], [row, tokens(3, 53)]):
        store = PolicyCache(POLICIES[policy])
        said, logits = generate(model, store, *padded(rows), max_new_tokens=7)
        decoded = said[0, -7:-1].tolist()
        want = dense_logits(model, row + decoded, length, seen_by(store, 0, length))
        assert apart(logits[0], want[length - 1 :]) < TOLERANCE
        if length > WINDOW and policy != "fastkv":
            held = store.layers[2].positions[0, 0, :-6]
            assert held[held >= 0].tolist() == list(range(length // WINDOW * WINDOW, length))


@pytest.mark.parametrize("policy", ["full_context", "snapkv"])
def test_two_turns_against_dense_attention(policy: str) -> None:
    model = chunked()
    read = read_two_turns(model, POLICIES[policy], ROWS, (19, 11))
    for row in range(2):
        assert apart(read.found(row), read.want(model, row)) < TOLERANCE


def test_positions_behind_a_drop_are_their_own() -> None:
    """By which the layers behind know chunks, and scale queries."""
    model, row, store = chunked(), ROWS[0], PolicyCache(POLICIES["fastkv"])
    said, logits = generate(model, store, torch.tensor([row]), max_new_tokens=7)
    passed = store.propagated[1][0].tolist()
    assert passed != list(range(47 - len(passed), 47))
    held = store.layers[2].positions[0, 0, :-6].tolist()
    assert held == [place for place in passed if place >= 32]
    seen = seen_by(store, 0, 47)
    want = dense_logits(model, row + said[0, 47:-1].tolist(), 47, seen)
    assert apart(logits[0], want[46:]) < TOLERANCE


@pytest.mark.parametrize("storage", [None, OffloadedStorage()])
@pytest.mark.parametrize("length", [47, 48])
def test_a_file_and_a_copy_go_on_alike(length: int, storage: Any, tmp_path: Path) -> None:
    """Also where nothing is held, the next token being the first of its chunk."""
    model, store = chunked(), PolicyCache(SNAPKV, storage)
    ids = torch.tensor([tokens(4, length)])
    with store.attached(model), torch.no_grad():
        model(ids, past_key_values=store)
    assert store.layers[0].kept_len == length % WINDOW
    store.save(tmp_path / "cache")
    loaded, fork = PolicyCache.load(tmp_path / "cache", storage=storage), copy.deepcopy(store)
    turn = torch.cat([ids, torch.tensor([tokens(5, 9)])], dim=1)
    _, want = generate(model, store, turn)
    for other in (loaded, fork):
        assert torch.equal(generate(model, other, turn)[1], want)
        assert_same_state(store, other)


def test_rows_are_taken_and_tokens_taken_back() -> None:
    store = PolicyCache(SNAPKV)
    generate(chunked(), store, *padded(ROWS))
    whole = copy.deepcopy(store)
    store.crop(-2)
    store.batch_select_indices(torch.tensor([1, 0, 1]))
    for layer, twin in zip(store.layers, whole.layers, strict=True):
        assert torch.equal(layer.positions, twin.positions[[1, 0, 1], :, :-2])
        assert torch.equal(layer.keys, twin.keys[[1, 0, 1], :, :-2])


def test_beams_are_the_models_own() -> None:
    model, ids = chunked(), torch.tensor(ROWS[:1])
    want, _ = generate(model, DynamicCache(config=model.config), ids, num_beams=3)
    found, _ = generate(model, PolicyCache(FullContext()), ids, num_beams=3)
    assert torch.equal(found, want)


@pytest.mark.parametrize("policy", ["full_context", "snapkv"])
def test_prompts_in_parts_and_drafts_change_nothing(policy: str) -> None:
    model, plain = chunked(), PolicyCache(POLICIES[policy])
    said, _ = generate(model, plain, *padded(ROWS))
    store = PolicyCache(POLICIES[policy])
    assert torch.equal(generate(model, store, *padded(ROWS), prefill_chunk_size=10)[0], said)
    assert_same_state(plain, store)
    if CHUNKS_GO_ON:
        generate(model, plain, *goes_on(said))
        generate(model, store, *goes_on(said), prefill_chunk_size=5)
        assert_same_state(plain, store)
    row = torch.tensor(ROWS[:1])
    want, _ = generate(model, PolicyCache(POLICIES[policy]), row, max_new_tokens=8)
    drafts = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 8}
    assert torch.equal(generate(model, PolicyCache(POLICIES[policy]), row, **drafts)[0], want)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_had_in_advance_changes_nothing(policy: str) -> None:
    """Nothing is decoded into buffers of a fixed size, where a step counts other positions."""
    model = chunked()
    grows, roomy = PolicyCache(POLICIES[policy]), PolicyCache(POLICIES[policy], max_new_tokens=9)
    want, found = (
        generate(model, each, *padded(ROWS), max_new_tokens=9)[1] for each in (grows, roomy)
    )
    assert torch.equal(found, want)
    with roomy.attached(model):
        assert not roomy.is_compileable


class Broken(Exception):  # noqa: N818
    pass


def fail(*_: Any) -> None:
    raise Broken


@torch.no_grad()
@pytest.mark.parametrize("at", range(3))
def test_a_failure_in_a_late_layer_is_undone(at: int) -> None:
    """In a prompt, in a step and in a second turn."""
    model, ends = chunked(), []
    calls = [torch.tensor(ROWS[:1]), torch.tensor([[5]]), torch.tensor([tokens(3, 11)])]
    for fails in (False, True):
        store = PolicyCache(SNAPKV)
        with store.attached(model):
            for call, new in enumerate(calls):
                if call == 2:
                    store.start_turn()
                if fails and call == at:
                    handle = decoder_layers(model)[-1].register_forward_hook(fail)
                    with pytest.raises(Broken):
                        model(new, past_key_values=store)
                    handle.remove()
                output = model(new, past_key_values=store)
        ends.append((output.logits, store))
    assert torch.equal(ends[0][0], ends[1][0])
    assert_same_state(ends[0][1], ends[1][1])


def test_what_needs_the_whole_context_is_refused_behind_a_chunk() -> None:
    model, ids = chunked(), torch.tensor(ROWS[:1])
    for policy, message in (
        (FastKV(tsp_layer=0), r"sees 16 of 47 tokens; layers that see all: \[1, 3\]"),
        (GemFilter(filter_layer=1), "restarts the prefill at new positions, 16 tokens, got 47"),
    ):
        store = PolicyCache(policy)
        with pytest.raises(UnsupportedModelError, match=message):
            generate(model, store, ids)
        assert store.get_seq_length() == 0
