import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy.selection import (
    compress,
    gather_positions,
    gather_slots,
    highest,
    ranks,
    select_between,
    select_top,
)


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)[None, None]


def test_padding_is_never_chosen_and_short_rows_are_filled_on_the_left() -> None:
    saliency = torch.tensor([[[9.0, 9.0, 1.0, 2.0]], [[4.0, 3.0, 2.0, 1.0]]])
    valid = torch.cat([flags(0, 0, 1, 1), flags(1, 1, 1, 1)])
    protected = torch.zeros_like(valid)
    kept = select_top(saliency, [1, 3], valid=valid, protected=protected)
    assert kept.tolist() == [[[-1, -1, 3]], [[0, 1, 2]]]


def test_the_lowest_scores_still_beat_padding_and_protection_is_not_taken_twice() -> None:
    saliency = torch.tensor([[[5.0, float("-inf"), float("nan"), 0.0]]])
    kept = select_top(saliency, [3], valid=flags(0, 1, 1, 1), protected=flags(0, 0, 0, 1))
    assert kept.tolist() == [[[1, 2, 3]]]


@given(scores=st.lists(st.integers(0, 3), min_size=1, max_size=12), data=st.data())
def test_against_sorting_in_plain_python(scores: list[int], data: st.DataObject) -> None:
    size = len(scores)
    bools = st.lists(st.booleans(), min_size=size, max_size=size)
    valid = data.draw(bools)
    protected = [a and b for a, b in zip(data.draw(bools), valid, strict=True)]
    budget = data.draw(st.integers(sum(protected), sum(valid)))
    free = sorted((-scores[i], i) for i in range(size) if valid[i] and not protected[i])
    chosen = [i for i in range(size) if protected[i]]
    chosen += [i for _, i in free[: budget - len(chosen)]]
    kept = select_top(
        torch.tensor([[scores]], dtype=torch.float32),
        [budget],
        valid=flags(*valid),
        protected=flags(*protected),
    )
    assert kept.tolist() == [[sorted(chosen)]]


def test_compress_keeps_order() -> None:
    chosen = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 1]], dtype=torch.bool)
    assert compress(chosen, 3).tolist() == [[0, 2, 3], [-1, -1, 3]]


def test_gathering_copies_and_fills() -> None:
    keys = torch.arange(2 * 3 * 5 * 7.0).view(2, 3, 5, 7)
    indices = torch.tensor([[[1, 4]] * 3, [[-1, 0]] * 3])
    taken = gather_slots(keys, indices)
    assert torch.equal(taken[0], keys[0, :, [1, 4]])
    assert torch.equal(taken[1, :, 1], keys[1, :, 0])
    assert taken[1, :, 0].abs().sum() == 0
    assert taken.untyped_storage().nbytes() == taken.numel() * 4
    positions = torch.tensor([[10, 20, 30]])
    assert gather_positions(positions, torch.tensor([[-1, 2]])).tolist() == [[-1, 30]]


@given(
    scores=st.lists(
        st.sampled_from([float("-inf"), float("nan"), -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=12
    ),
    data=st.data(),
)
def test_the_highest_are_those_of_the_first_ranks(scores: list[float], data: st.DataObject) -> None:
    size = len(scores)
    free = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    count = data.draw(st.integers(0, sum(free)))
    saliency, candidates = torch.tensor([scores] * 2), torch.tensor([free, [True] * size])
    taken = highest(saliency, candidates, [count, size])
    places = ranks(saliency, candidates)
    assert torch.equal(taken[0], candidates[0] & (places[0] < count))
    assert bool(taken[1].all())


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, float("nan"), float("-inf")]), min_size=3, max_size=9),
    st.integers(0, 2),
    st.integers(0, 2),
    st.data(),
)
def test_between_protected_slots_as_with_masks(
    scores: list[float], first: int, tail: int, data: st.DataObject
) -> None:
    length = len(scores)
    first, tail = min(first, length), min(tail, length - min(first, length))
    count = data.draw(st.integers(max(first + tail, 1), length))
    saliency = torch.tensor([[scores, scores[::-1]]])
    slots = torch.arange(length).expand_as(saliency)
    protected = (slots < first) | (slots >= length - tail)
    valid = torch.ones_like(protected)
    expected = select_top(saliency, [count], valid=valid, protected=protected)
    assert torch.equal(select_between(saliency, count, first=first, tail=tail), expected)
