"""Tokens are dropped where two layers agree: on paper, against slow loops, and in a model."""

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy import CachePolicy, LayerContext
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.layer_inputs import LayerInputs
from kvpolicy.policies import AgreementPropagation, GQAGroupSelector, WindowMaxPoolScorer
from tests.contexts import layer_context
from tests.reference.models import random_tokens, tiny_model


def layer(
    rows: list[list[float]],
    before: list[list[float]],
    layer_idx: int = 2,
    lens: tuple[int, ...] = (),
) -> tuple[Tensor, LayerContext]:
    """One head's saliencies at a layer of 12 and at the one before, rows padded on the left."""
    batch, length = len(rows), len(rows[0])
    slots = torch.arange(length)
    starts = torch.tensor([length - each for each in lens or (length,) * batch])[:, None]
    context = layer_context(
        torch.zeros(batch, 1, length, 3),
        layer_idx=layer_idx,
        num_layers=12,
        positions=torch.where(slots < starts, -1, slots - starts)[:, None],
        new_valid=slots >= starts,
        seen_len=tuple((length - starts).flatten().tolist()),
        layer=LayerInputs(history=(torch.tensor(before)[:, None],)),
    )
    return torch.tensor(rows)[:, None], context


HERE = [0.0, 0.9, 0.0, 0.8, 0.0, 0.1]
SAME = [0.1, 0.5, 0.0, 0.7, 0.0, 0.0]
OTHER = [0.9, 0.0, 0.8, 0.0, 0.1, 0.0]
HALF = [0.9, 0.8, 0.0, 0.0, 0.0, 0.0]
PART = AgreementPropagation(None, window_size=1, tsp_tokens=3, agreement=1.0)


@pytest.mark.parametrize(
    ("before", "layer_idx", "agreement", "expected"),
    [
        (SAME, 2, 1.0, [1, 3, 5]),
        (OTHER, 2, 1.0, None),
        (OTHER, 5, 1.0, [1, 3, 5]),  # the last that may act
        (HALF, 2, 1.0, None),
        (HALF, 2, 0.5, [1, 3, 5]),
        (OTHER, 2, 0.0, [1, 3, 5]),
    ],
)
def test_the_best_go_on_where_the_layer_before_agrees(
    before: list[float], layer_idx: int, agreement: float, expected: list[int] | None
) -> None:
    saliency, context = layer([HERE], [before], layer_idx)
    passed = attrs.evolve(PART, agreement=agreement).propagate(saliency, context)
    assert (passed is None) == (expected is None)
    assert passed is None or passed[0].tolist() == expected


def test_each_row_drops_where_it_agrees_and_no_row_twice() -> None:
    saliency, context = layer([HERE, HERE, HERE], [SAME, OTHER, SAME], lens=(6, 6, 3))
    passed = PART.propagate(saliency, context)
    assert passed is not None
    # The third has no more than go on.
    everything = [0, 1, 2, 3, 4, 5]
    assert passed.tolist() == [[-1, -1, -1, 1, 3, 5], everything, [-1, -1, -1, 3, 4, 5]]


@given(seed=st.integers(0, 2**31), agreement=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_as_by_hand(seed: int, agreement: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    here, before = torch.rand(2, 1, 11, generator=generator)
    before = torch.where(torch.rand(11, generator=generator) < 0.6, here, before)
    saliency, context = layer(here.tolist(), before.tolist())
    part = AgreementPropagation(None, window_size=2, tsp_tokens=6, agreement=agreement)

    def best(scores: Tensor) -> set[int]:
        order = sorted(range(9), key=lambda slot: (-float(scores[0, slot]), slot))
        return set(order[:4])

    agree = len(best(here) & best(before)) >= agreement * 4
    passed = part.propagate(saliency, context)
    assert (passed is not None) == agree
    if passed is not None:
        assert passed[0].tolist() == sorted(best(here) | {9, 10})


def test_layers_and_rates() -> None:
    part = AgreementPropagation(0.25)
    assert sorted(part.acting_layers(8)) == [1, 2, 3]
    assert part.layer_rates(8) == [1.0] * 4 + [0.25] * 4
    assert part.decides_by_content
    assert part.acting_layers(1) == frozenset()
    assert sorted(part.placed(12, [0, 3, 4, 8, 11]).acting_layers(12)) == [3, 4]
    assert sorted(part.placed(12, [0, 8, 11]).acting_layers(12)) == [8]
    named = attrs.evolve(part, tsp_layers=(2, 5))
    assert named.placed(12, [1, 4]) is named


def test_in_a_model_rows_drop_as_they_would_alone() -> None:
    """Each after a layer of its own, with the tokens and the logits that it has alone."""
    model = tiny_model("llama", seed=5, num_layers=8)
    policy = CachePolicy(
        WindowMaxPoolScorer(4, kernel_size=3),
        GQAGroupSelector(0.2, window_size=4),
        AgreementPropagation(0.3, window_size=4, agreement=0.4),
    )
    lengths = (60, 41, 55, 47)
    rows = [random_tokens(seed, length) for seed, length in enumerate(lengths)]
    ids = torch.tensor([[0] * (60 - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (60 - len(row)) + [1] * len(row) for row in rows])

    def read(ids: Tensor, mask: Tensor) -> tuple[list[list[list[int]]], Tensor]:
        """For every row the tokens that each layer passes on where any does, and the logits."""
        cache = PolicyCache(policy)
        with cache.attached(model), torch.no_grad():
            logits = model(ids, attention_mask=mask, cache=cache).logits[:, -1]
        passed = [cache.propagated[layer] for layer in sorted(cache.propagated)]
        return [
            [[int(token) for token in of_layer[row] if token >= 0] for of_layer in passed]
            for row in range(len(ids))
        ], logits

    together, logits = read(ids, mask)
    dropped_after = set()
    for row, ids_alone, own in zip(together, rows, logits, strict=True):
        (alone,), expected = read(torch.tensor([ids_alone]), torch.ones(1, len(ids_alone)))
        assert torch.allclose(own, expected[0], atol=1e-4)
        assert [len(ids_alone) > len(each) for each in row].count(True) >= 1
        assert row[-1] == alone[-1]
        fewer = [index for index, each in enumerate(row) if len(each) < len(ids_alone)]
        dropped_after.add(fewer[0])
    assert len(dropped_after) > 1
