"""The interval of paired differences, against its published form for right and wrong answers."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.evaluation.intervals import paired_difference


def bonett_price(both: int, lost: int, won: int, neither: int) -> tuple[float, float]:
    """Bonett and Price (2012), from a table of four counts."""
    count = both + lost + won + neither
    p_won, p_lost = (won + 1) / (count + 2), (lost + 1) / (count + 2)
    half = 1.959964 * math.sqrt((p_won + p_lost - (p_won - p_lost) ** 2) / (count + 2))
    return max(p_won - p_lost - half, -1.0), min(p_won - p_lost + half, 1.0)


@pytest.mark.parametrize(
    ("both", "lost", "won", "neither"), [(1, 0, 0, 0), (0, 0, 7, 0), (40, 8, 1, 3), (0, 5, 5, 90)]
)
def test_is_the_published_interval(both: int, lost: int, won: int, neither: int) -> None:
    full = [1.0] * (both + lost) + [0.0] * (won + neither)
    own = [1.0] * both + [0.0] * lost + [1.0] * won + [0.0] * neither
    found = paired_difference(own, full)
    assert (found.low, found.high) == pytest.approx(bonett_price(both, lost, won, neither))
    assert found.mean == pytest.approx((won - lost) / len(full))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=40))
def test_properties(pairs: list[tuple[float, float]]) -> None:
    own, full = map(list, zip(*pairs, strict=True))
    found = paired_difference(own, full)
    assert -1 <= found.low <= found.mean + 1e-9
    assert found.mean - 1e-9 <= found.high <= 1
    assert found.low < found.high  # never sure
    turned = paired_difference(full, own)
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low), abs=1e-9)


def test_covers_what_is_true_as_often_as_it_says() -> None:
    draw = random.Random(0)
    # P(lost), P(won), prompts: from rare to common differences.
    for lost, won, count in ((0.05, 0.0, 40), (0.2, 0.1, 40), (0.5, 0.05, 100), (0.0, 0.0, 20)):
        covered, rounds = 0, 1000
        for _ in range(rounds):
            own, full = [], []
            for _ in range(count):
                where = draw.random()
                own.append(float(lost <= where < lost + won))
                full.append(float(where < lost))
            found = paired_difference(own, full)
            covered += found.low <= won - lost <= found.high
        assert covered / rounds > 0.935, (lost, won, count)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="at least one, got 0 and 0"):
        paired_difference([], [])
    with pytest.raises(ValueError, match="one entry for each prompt"):
        paired_difference([1.0], [1.0, 0.0])
