"""The prompt's queries replayed after the prompt, on paper and against slow loops."""

import math

import pytest
import torch

from kvpolicy import LayerContext
from kvpolicy.layer_inputs import AttentionSettings
from kvpolicy.policies import ReplayedAttentionScorer
from kvpolicy.policies.scorers import replayed
from kvpolicy.rotary import PlainRotary
from kvpolicy.testing import check_scorer
from tests.contexts import with_layer
from tests.policies.views import view_of
from tests.reference.replayed import replayed_peaks

from .support import THETA, in_a_later_turn, turning


def slow(context: LayerContext, row: int, head: int) -> list[float]:
    view = view_of(context, row)
    group = len(view.queries) // len(view.entries)
    return replayed_peaks(
        [list(each) for each in view.queries[head * group : (head + 1) * group]],
        view.new_positions,
        view.entries[head],
        scaling=view.scaling,
        theta=THETA,
    )


def test_against_slow_loops_in_padded_rows() -> None:
    lens = (19, 11, 3)
    context = turning(1, lens, 19)
    found = ReplayedAttentionScorer().score(context)
    for row, length in enumerate(lens):
        for head in range(3):
            here = found[row, head, 19 - length :].tolist()
            assert here == pytest.approx(slow(context, row, head), rel=1e-4, abs=1e-6)
            assert found[row, head, : 19 - length].tolist() == [0.0] * (19 - length)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    context = turning(2, (23, 17), 23)
    whole = ReplayedAttentionScorer().score(context)
    monkeypatch.setattr(replayed, "BLOCK", 5)
    torch.testing.assert_close(ReplayedAttentionScorer().score(context), whole)


def test_in_a_later_turn_only_new_queries_ask() -> None:
    context = in_a_later_turn(turning(3, (9, 9), 3))
    found = ReplayedAttentionScorer().score(context)
    for row in range(2):
        for head in range(3):
            held = context.positions[row, head] >= 0
            expected = slow(context, row, head)
            assert found[row, head][held].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("softcap", "sink"), [(None, None), (2.0, None), (None, 1.5), (2.0, 1.5)])
def test_a_query_sees_later_tokens_as_from_after_the_prompt(
    softcap: float | None, sink: float | None
) -> None:
    """On paper: one head, two channels, keys that look as if their token were at position 0."""
    rotary = PlainRotary(2)
    plain = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [4.0, 0.0]]]])
    places = torch.arange(3)[None, None]
    # Before rotary embedding every key is turned so that at position 3 the query meets `plain`.
    keys = rotary.turned(plain, torch.full_like(places, 3))
    queries = rotary.turned(torch.tensor([[[[1.0, 0.0], [0.0, 3.0], [0.0, 0.0]]]]), places)
    context = with_layer(
        LayerContext(
            layer_idx=0,
            num_layers=1,
            queries=queries,
            keys=keys,
            values=plain,
            positions=places,
            new_valid=torch.ones(1, 3, dtype=torch.bool),
            seen_len=(3,),
            attention=AttentionSettings(
                1.0, softcap, None if sink is None else torch.tensor([sink])
            ),
        ),
        rotary=rotary,
    )
    # Each row is what one query asks; the first asks most for the third token, which is later.
    logits = torch.tensor([[1.0, 0.0, 4.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]])
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    weights = logits.exp()
    weights /= weights.sum(dim=1, keepdim=True) + (0.0 if sink is None else math.exp(sink))
    expected = weights.amax(dim=0)
    torch.testing.assert_close(ReplayedAttentionScorer().score(context)[0, 0], expected)


def test_the_contract() -> None:
    check_scorer(ReplayedAttentionScorer())
