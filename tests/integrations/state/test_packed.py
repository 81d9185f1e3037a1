"""Rows and heads held without padding, against the same tokens padded."""

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy.integrations.transformers import (
    OffloadedStorage,
    PlainStorage,
    QuantizedStorage,
    Storage,
)
from kvpolicy.integrations.transformers.state import storage
from kvpolicy.integrations.transformers.state.packed import Packed, wastes_slots
from kvpolicy.integrations.transformers.state.storage import StoredKV

STORAGES = st.sampled_from([PlainStorage(), OffloadedStorage()])


def kept_of(counts: list[list[int]], width: int) -> Tensor:
    """Slots ``[batch, kv_heads, width]``: of each head the last ``count`` of those there are."""
    return torch.tensor(
        [[[-1] * (width - count) + list(range(7 - count, 7)) for count in row] for row in counts],
        dtype=torch.int64,
    )


def pair_of(storage: Storage, counts: list[list[int]], seed: int = 0) -> tuple[Packed, StoredKV]:
    """7 tokens of each head, of which some are kept: packed and padded."""
    width = max(max(row) for row in counts)
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(len(counts), len(counts[0]), 7, 5, generator=random)
    values = torch.randn(len(counts), len(counts[0]), 7, 3, generator=random)
    kept = kept_of(counts, width)
    padded = [torch.zeros(*kept.shape, each.shape[3]) for each in (keys, values)]
    for row, heads in enumerate(counts):
        for head, count in enumerate(heads):
            for whole, each in zip(padded, (keys, values), strict=True):
                whole[row, head, width - count :] = each[row, head, 7 - count :]
    return Packed.of(storage, keys, values, kept), PlainStorage().hold(padded[0], padded[1])


def assert_alike(packed: StoredKV, padded: StoredKV) -> None:
    """They read alike, and the packed one holds as many bytes as it says."""
    assert packed.shape == padded.shape
    assert packed.widths == padded.widths
    for one, other in zip(packed.read(), padded.read(), strict=True):
        assert torch.equal(one, other)
    assert packed.capacity >= packed.shape[2]
    assert packed.taken_nbytes() == packed.slots * (5 + 3) * 4 <= packed.nbytes()


@st.composite
def operations(draw: st.DrawFn) -> tuple[list[list[int]], list[tuple[str, int]]]:
    """What each head keeps, and what is done with it then."""
    heads = st.lists(st.integers(0, 7), min_size=2, max_size=2)
    counts = draw(st.lists(heads, min_size=1, max_size=3))
    steps = st.tuples(
        st.sampled_from(["append", "append", "first", "rows", "room"]), st.integers(0, 40)
    )
    return counts, draw(st.lists(steps, max_size=7))


def done(held: StoredKV, step: str, number: int) -> StoredKV:
    """The same step of either form."""
    batch, heads, length, _ = held.shape
    if step == "append":
        random = torch.Generator().manual_seed(number)
        count = 1 + number % 3
        widths = held.widths
        new = [torch.randn(batch, heads, count, each, generator=random) for each in widths]
        return held.appended(new[0], new[1])
    if step == "first":
        return held.first(number % (length + 1))
    if step == "rows":
        return held.rows(torch.tensor([number % batch, (number + 1) % batch]))
    return held.with_room(number)


@given(drawn=operations(), storage=STORAGES)
def test_all_that_can_be_done_with_what_is_held(
    drawn: tuple[list[list[int]], list[tuple[str, int]]], storage: Storage
) -> None:
    """Also with what was held before, which never changes."""
    counts, steps = drawn
    history = [pair_of(storage, counts)]
    for step, number in steps:
        packed, padded = history[-1]
        history.append((done(packed, step, number), done(padded, step, number)))
        _, padded = history[0]
        done(history[0][0], "append", number + 1)  # a fork, which nobody else sees
    for packed, padded in history:
        assert isinstance(packed, Packed)
        assert_alike(packed, padded)


@given(counts=st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2), min_size=1, max_size=3))
def test_the_bytes_are_those_of_the_tokens(counts: list[list[int]]) -> None:
    packed, _ = pair_of(PlainStorage(), counts)
    tokens = sum(map(sum, counts))
    keys, values = packed.chosen.read()
    assert keys.untyped_storage().nbytes() == tokens * 5 * 4
    assert values.untyped_storage().nbytes() == tokens * 3 * 4
    assert packed.nbytes() == tokens * (5 + 3) * 4
    grown = done(packed, "append", 3)
    assert grown.nbytes() <= (tokens + packed.shape[:2].numel() * 18) * (5 + 3) * 4


def test_appending_copies_nothing_of_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "COPIED_BYTES", 0)  # which may be copied with each token
    packed, _ = pair_of(PlainStorage(), [[7, 2]])
    kept = packed.chosen.read()[0].data_ptr()
    held: Any = packed
    starts = set()
    for step in range(40):
        held = done(held, "append", 3 * step)
        assert held.chosen.read()[0].data_ptr() == kept
        starts.add(held.recent.read()[0].data_ptr())
    assert len(starts) <= 4


@pytest.mark.parametrize(("lengths", "wastes"), [((16, 14), False), ((16, 13), True)])
def test_a_sixteenth_may_be_padding(lengths: tuple[int, int], wastes: bool) -> None:
    positions = torch.stack([torch.arange(16) - (16 - length) for length in lengths])[None]
    positions = positions.clamp(min=-1)
    assert wastes_slots(positions, int((positions >= 0).sum())) == wastes


@pytest.mark.skipif(importlib.util.find_spec("optimum") is None, reason="quanto is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_quantised_it_is_as_precise_as_padded() -> None:
    """Numbers share scales with those of their own token only, wherever it stands."""
    storage = QuantizedStorage(q_group_size=8, residual_length=3)
    keys = torch.randn(2, 2, 9, 16)
    kept = torch.tensor([[[1, 2, 5, 8], [-1, -1, 3, 7]], [[-1, -1, -1, 0], [-1, -1, -1, -1]]])
    packed = Packed.of(storage, keys, -keys, kept)
    whole = storage.hold(keys, -keys).read()[0]
    new = torch.randn(2, 2, 2, 16)
    held: StoredKV = packed.appended(new, -new)
    for row in range(2):
        for head in range(2):
            slots = kept[row, head][kept[row, head] >= 0]
            own = held.read()[0][row, head]
            assert torch.equal(own[4 - len(slots) : 4], whole[row, head, slots])
            assert torch.equal(own[4:], new[row, head])
    assert 0 < packed.nbytes() < 7 * 2 * 16 * 4 / 2
    held = held.appended(new, -new)  # there are more than 3 now
    assert held.shape == (2, 2, 8, 16)
    assert (held.read()[0][:, :, 4:6] - new).abs().max() < 0.5
    assert torch.equal(held.rows(torch.tensor([1])).read()[0][:, :, :4], held.read()[0][1:, :, :4])


def test_gradients_reach_what_was_kept() -> None:
    keys = torch.randn(1, 2, 7, 5, requires_grad=True)
    held = Packed.of(PlainStorage(), keys, keys, kept_of([[3, 1]], 3))
    token = torch.ones(1, 2, 1, 5, requires_grad=True)
    held.appended(token, token).read()[0].sum().backward()
    assert keys.grad is not None
    assert keys.grad[0, :, :, 0].tolist() == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]]
    assert torch.equal(token.grad, torch.ones_like(token))


PROCESS = """
import torch, resource
from kvpolicy.integrations.transformers.state.layer import PolicyLayer

def held_now():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def hold(count):
    layer = PolicyLayer()
    keys = torch.ones(1, 4, 60000, 64)
    kept = torch.full((1, 4, 32000), -1)
    for head, tokens in enumerate((32000, count, count, count)):
        kept[0, head, 32000 - tokens:] = torch.arange(tokens)
    layer.store(keys, keys, torch.arange(60000).expand(1, 4, -1), kept)
    return layer

hold(10)
before = held_now()
layer = hold(4000)
print(held_now() - before, layer.nbytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_holds_no_more() -> None:
    """4 heads with 32,000 and thrice 4,000 tokens: 22.5 MB, where padding would make 65.5 MB."""
    run = subprocess.run(
        [sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True
    )
    grown, said = map(int, run.stdout.split())
    assert said == 44000 * 64 * 4 * 2
    positions = 4 * 32000 * 8
    assert said * 0.9 < grown < said + positions + 4 * 2**20
