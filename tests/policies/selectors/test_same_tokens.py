"""The same tokens in all heads of all layers, worked by hand."""

import attrs
import pytest
import torch

from kvpolicy.policies import GQAGroupSelector, ReplayKV, SameTokensSelector

from .test_global_threshold import FIRST, SCORES, SECOND, layer

THREE = layer([[[0, 1, 2, 3, 4]] * 2], seen=5)


def test_by_hand() -> None:
    # The first head's scores stand out at 1, the second's, of another scale, at 3.
    scores = torch.tensor([[[0.1, 0.9, 0.2, 0.1, 0.1], [50.0, 40.0, 40.0, 90.0, 60.0]]])
    one = SameTokensSelector(0.4, window_size=0, kernel_size=1)
    assert one.select(scores, THREE).tolist() == [[[1, 3]] * 2]
    # Standardized: -.58 2 -.26 -.58 -.58 and -.32 -.86 -.86 1.84 .22, so that the largest are
    # -.32 2 -.26 1.84 .22; of three neighbours, the sums are 1.68 1.42 3.58 1.8 2.06.
    spans = attrs.evolve(one, kernel_size=3)
    assert spans.select(scores, THREE).tolist() == [[[2, 4]] * 2]


def test_protected_tokens_are_kept_and_count_as_0_for_their_neighbours() -> None:
    scores = torch.tensor([[[9.0, 0.0, 1.0, 2.0, 3.0]]])
    one = attrs.evolve(layer([[[0, 1, 2, 3, 4]]], seen=5))
    selector = SameTokensSelector(0.6, window_size=0, protect=1, kernel_size=3)
    # Standardized among the last four: -1.34 -.45 .45 1.34; the sums are -1.79 -1.34 1.34 1.79.
    assert selector.select(scores, one).tolist() == [[[0, 3, 4]]]


def test_layers_that_hold_fewer_tokens_keep_the_highest_that_they_hold() -> None:
    selector = SameTokensSelector(0.25, window_size=0, kernel_size=1)
    # Standardized 1.13 -1.13 .85 -.85 and 0 1.63 -.82 -.82, and at 1 and 3 of the second layer 1
    # and -1: the largest are 1.13 1.63 .85 -.82.
    first, second = selector.select_together(SCORES, [FIRST, SECOND])
    assert first.tolist() == [[[1]] * 2]
    assert second.tolist() == [[[0]]]
    # Without what stands out at 1, the first of all is 0, which the second layer does not hold.
    low = torch.tensor([[[0.9, 0.1, 0.8, 0.2], [0.7, 0.1, 0.1, 0.3]]])
    first, second = selector.select_together([low, SCORES[1].flip(2)], [FIRST, SECOND])
    assert first.tolist() == [[[0]] * 2]
    assert second.tolist() == [[[1]]]


def test_neighbours_are_those_that_are_left() -> None:
    scores = torch.tensor([[[1.0, 0.0, 0.0, 9.0]]])
    near = layer([[[0, 1, 2, 3]]], seen=4)
    apart = layer([[[5, 20, 21, 90]]], seen=91)
    selector = SameTokensSelector(retention_tokens=2, window_size=0, kernel_size=3)
    assert selector.select(scores, near).tolist() == selector.select(scores, apart).tolist()


@pytest.mark.parametrize("uniform", [False, True])
def test_replaykv_bounds_an_answer_head_by_head(uniform: bool) -> None:
    policy = ReplayKV(0.2, head_uniform=uniform, decoding=9, window_size=2, protect=5)
    assert policy.has_decoding_rule
    assert policy.decoding is not None
    assert policy.decoding.most_tokens == 9
    own = GQAGroupSelector(retention_tokens=9, window_size=2, protect=5)
    assert policy.decoding.selector == own
