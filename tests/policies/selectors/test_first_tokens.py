"""First tokens beyond the budget: by plain loops over the tokens behind them, in all that wraps."""

import attrs
import pytest
import torch

from kvpolicy.host_counts import known_counts
from kvpolicy.policies import (
    FirstTokensWholeSelector,
    GlobalThresholdSelector,
    GQAGroupSelector,
    KVzip,
)
from tests.policies.scorers.support import random_layer
from tests.policies.views import slots_of
from tests.reference.selection import highest

LENS = (31, 14, 6)


def by_hand(scores: list[float], whole: int, budget: int, window: int) -> list[int]:
    """Indices of the first tokens, the last ones, and the best of the others behind the first."""
    first = list(range(min(whole, len(scores))))
    window_slots = list(range(max(len(scores) - window, len(first)), len(scores)))
    others = range(len(first), len(scores) - len(window_slots))
    free = max(budget - len(window_slots), 0)
    best = highest([scores[index] for index in others], free)
    return [*first, *(len(first) + place for place in best), *window_slots]


@pytest.mark.parametrize("whole", [0, 3, 9, 40])
def test_a_rate_is_one_of_the_tokens_behind(whole: int) -> None:
    context, saliency = random_layer(1, LENS), torch.rand(3, 3, 31)
    selector = FirstTokensWholeSelector(GQAGroupSelector(0.3, window_size=2), whole_tokens=whole)
    kept = selector.select(saliency, context)
    for row, length in enumerate(LENS):
        budget = int((max(length - whole, 0)) * 0.3)
        for head in range(3):
            scores = saliency[row, head, 31 - length :].tolist()
            wanted = by_hand(scores, whole, budget, 2)
            assert slots_of(kept[row, head], context, row) == wanted
    told = attrs.evolve(context, held_len=LENS)
    assert known_counts(selector, told) == tuple((kept[:, 0] >= 0).sum(dim=-1).tolist())


def test_one_threshold_over_what_is_behind() -> None:
    contexts = [random_layer(seed, LENS) for seed in (1, 2)]
    saliencies = [torch.rand(3, 3, 31, generator=torch.Generator().manual_seed(9))] * 2
    selector = FirstTokensWholeSelector(GlobalThresholdSelector(0.3, window_size=0), whole_tokens=5)
    found = selector.select_together(saliencies, contexts)
    for row, length in enumerate(LENS):
        own = [each[row, :, 31 - length + 5 :].flatten().tolist() for each in saliencies]
        places = sorted(
            highest(own[0] + own[1], 2 * 3 * int((length - 5) * 0.3) or 2 * 3)  # at least one each
        )
        for layer, kept in enumerate(found):
            for head in range(3):
                start = (layer * 3 + head) * (length - 5)
                wanted = [5 + p - start for p in places if start <= p < start + length - 5]
                assert slots_of(kept[row, head], contexts[layer], row) == [*range(5), *wanted]


def test_a_later_turn_may_not_hold_them() -> None:
    """Of a row of 40 tokens seen, one head holds two of the first five, another one."""
    context = random_layer(3, (12,))
    positions = torch.tensor([[[1, 4, *range(30, 40)], [4, 9, *range(30, 40)], [*range(28, 40)]]])
    later = attrs.evolve(context, positions=positions, seen_len=(40,))
    selector = FirstTokensWholeSelector(GQAGroupSelector(0.1, window_size=1), whole_tokens=5)
    kept = selector.select(torch.arange(12.0).expand(1, 3, 12), later)
    places = [
        [positions[0, head, slot] for slot in kept[0, head] if slot >= 0] for head in (0, 1, 2)
    ]
    assert places == [[1, 4, 37, 38, 39], [4, 37, 38, 39], [37, 38, 39]]  # int(35 * 0.1)


def test_heads_that_protect_as_many_may_keep_unlike_numbers() -> None:
    """Of 40 tokens seen, one head holds both of the first two, another one of them."""
    context = random_layer(3, (12,))
    rest = [*range(31, 40)]
    positions = torch.tensor([[[0, 1, 5, *rest], [1, 5, 6, *rest], [0, 1, 5, *rest]]])
    later = attrs.evolve(context, positions=positions, seen_len=(40,))
    selector = FirstTokensWholeSelector(
        GQAGroupSelector(0.15, window_size=1, protect=9), whole_tokens=2
    )
    assert selector.protected(later).sum(dim=-1).tolist() == [[4, 4, 4]]
    kept = selector.select(torch.arange(12.0).expand(1, 3, 12), later)
    assert (kept >= 0).sum(dim=-1).tolist() == [[2 + 5, 1 + 5, 2 + 5]]  # int(38 * 0.15) behind
    assert not selector.equal_counts


def test_what_it_says_of_itself() -> None:
    inner = GQAGroupSelector(0.1, window_size=8, protect=7)
    selector = FirstTokensWholeSelector(inner, whole_tokens=5)
    assert (selector.protected_first, selector.budget, selector.equal_counts) == (7, None, False)
    assert FirstTokensWholeSelector(inner, whole_tokens=7).equal_counts
    assert FirstTokensWholeSelector(inner, whole_tokens=0).equal_counts
    assert FirstTokensWholeSelector(inner, whole_tokens=0).budget == inner.budget
    assert selector.kept_rates(2, context_len=4) == [1.0, 1.0]
    assert selector.kept_rates(2) == [0.1, 0.1]
    assert not selector.decides_together
    assert FirstTokensWholeSelector(GlobalThresholdSelector()).decides_together


def test_kvzip_is_made_of_it() -> None:
    method = KVzip(0.2, num_sinks=4, whole_tokens=50)
    assert method.selector == FirstTokensWholeSelector(
        GlobalThresholdSelector(0.2, window_size=0, protect=4), whole_tokens=50
    )
    assert method.rereading is not None
    assert (method.rereading.num_sinks, method.rereading.unrepeated) == (50, 50)
    assert method.selector.kept_rates(2, 150) == pytest.approx([0.7 / 1.5] * 2)
