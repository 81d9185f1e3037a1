"""The prompt's queries replayed after the prompt, on paper and against slow loops."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kvpolicy import LayerContext
from kvpolicy.layer_inputs import AttentionSettings, LayerInputs
from kvpolicy.policies import ReplayedAttentionScorer
from kvpolicy.policies.scorers import replayed
from kvpolicy.rotary import PlainRotary
from tests.contexts import layer_context
from tests.policies.views import group_of, view_of
from tests.reference.replayed import replayed_peaks

from .support import THETA, check_tokens, in_a_later_turn, turning

REACHES = [(4, 512), (2, 5), (0, 1), (40, 3)]


def check_slowly(found: Tensor, context: LayerContext, reach: int, sample_size: int) -> None:
    def expected(row: int, head: int) -> list[float]:
        view = view_of(context, row)
        return replayed_peaks(
            group_of(view, head),
            view.new_positions,
            view.entries[head],
            scaling=view.scaling,
            theta=THETA,
            reach=reach,
            sample_size=sample_size,
        )

    check_tokens(found, context, expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("reach", "sample_size"), REACHES)
def test_against_slow_loops_in_padded_rows(reach: int, sample_size: int) -> None:
    context = turning(1, (19, 11, 3), 19)
    found = ReplayedAttentionScorer(reach=reach, sample_size=sample_size).score(context)
    check_slowly(found, context, reach, sample_size)
    assert not found[~context.valid].any()


@pytest.mark.parametrize(("reach", "sample_size"), REACHES)
def test_blocks_of_queries_change_nothing(
    reach: int, sample_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, scorer = (
        turning(2, (23, 17), 23),
        ReplayedAttentionScorer(reach=reach, sample_size=sample_size),
    )
    whole = scorer.score(context)
    # Of two rows, six query heads, and as many keys as are sampled.
    query_bytes = 4 * 2 * 6 * (4 + min(sample_size, 23))
    monkeypatch.setattr(replayed, "block_bytes", lambda device: 5 * query_bytes)
    torch.testing.assert_close(scorer.score(context), whole)


def test_work_grows_with_the_length_and_not_with_its_square() -> None:
    scorer, counted = ReplayedAttentionScorer(reach=2, sample_size=8), []
    for length in (256, 512):
        with FlopCounterMode(display=False) as counter:
            scorer.score(turning(5, (length,), length))
        counted.append(counter.get_total_flops())
    assert 0 < counted[1] < 2.01 * counted[0]


@pytest.mark.parametrize(("reach", "sample_size"), REACHES)
def test_in_a_later_turn_all_new_queries_judge_what_was_held(
    reach: int, sample_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = in_a_later_turn(turning(3, (9, 9), 3))
    scorer = ReplayedAttentionScorer(reach=reach, sample_size=sample_size)
    found = scorer.score(context)
    monkeypatch.setattr(replayed, "block_bytes", lambda device: 1)
    torch.testing.assert_close(scorer.score(context), found)
    check_slowly(found, context, reach, sample_size)


@pytest.mark.parametrize(("softcap", "sink"), [(None, None), (2.0, None), (None, 1.5), (2.0, 1.5)])
def test_a_query_asks_for_later_tokens_as_from_after_the_prompt(
    softcap: float | None, sink: float | None
) -> None:
    """On paper: one head, two channels, keys that look as if their token were at position 0."""
    rotary = PlainRotary(2)
    plain = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [4.0, 0.0]]]])
    places = torch.arange(3)[None, None]
    # Before rotary embedding every key is turned so that at position 3 the query meets `plain`.
    keys = rotary.turned(plain, torch.full_like(places, 3))
    queries = rotary.turned(torch.tensor([[[[1.0, 0.0], [0.0, 3.0], [0.0, 0.0]]]]), places)
    sinks = None if sink is None else torch.tensor([sink])
    context = layer_context(
        keys,
        queries=queries,
        attention=AttentionSettings(1.0, softcap, sinks),
        layer=LayerInputs(rotary=rotary),
    )
    # Each row is what one query asks; the first asks most for the third token, which is later.
    logits = torch.tensor([[1.0, 0.0, 4.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0]])
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    weights = logits.exp()
    weights /= weights.sum(dim=1, keepdim=True) + (0.0 if sink is None else math.exp(sink))
    expected = weights.triu().amax(dim=0)  # a token's own query, and those before it
    torch.testing.assert_close(ReplayedAttentionScorer().score(context)[0, 0], expected)
