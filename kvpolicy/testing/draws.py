"""Draws the examples of a check: a fixed set first, then hypothesis's if it is installed.

Part of `kvpolicy.testing`.
"""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvpolicy.context import LayerContext

if TYPE_CHECKING:
    from hypothesis import strategies as st

Choice = TypeVar("Choice")
Drawn = TypeVar("Drawn")

# Number of fixed examples, which run before those of hypothesis, or without hypothesis.
FIRST = 5
ALONE = 40
# The longest ranges that examples of the fixed set draw from, in turn: a fault in a layer of few
# tokens is easier to read.
SPANS = (6, 12, 24, 60, 400)
# Chosen among 40 series: its first examples find the 24 broken parts that it was tried on.
SERIES = 22
MISSING = "{what} needs hypothesis, which draws the layers: pip install 'kvpolicy[test]'"


class Draws(abc.ABC):
    """Base of what draws the values of an example."""

    @abc.abstractmethod
    def between(self, low: int, high: int) -> int:
        """Draw any integer from ``low`` to ``high``, both included."""

    def integer(self, low: int, high: int) -> int:
        """Draw an integer from ``low`` to ``high``; a class may prefer small ones."""
        return self.between(low, high)

    def choice(self, options: Sequence[Choice]) -> Choice:
        """Draw one of several options."""
        return options[self.between(0, len(options) - 1)]

    def seed(self) -> int:
        """Draw the seed of a random generator."""
        return self.between(0, 2**31 - 1)


class FixedDraws(Draws):
    """Draws the same values in every run, by the example's number, from 0."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(f"{SERIES} example {number}")
        self._span = SPANS[number % len(SPANS)]

    def between(self, low: int, high: int) -> int:
        """Draw any integer from ``low`` to ``high``."""
        return self._random.randint(low, high)

    def integer(self, low: int, high: int) -> int:
        """Draw an integer from ``low`` to ``high``, in early examples a small one."""
        return self.between(low, min(high, low + self._span))


class HypothesisDraws(Draws):
    """Lets hypothesis draw the values, by its ``draw``, so that it can search and shrink."""

    def __init__(self, draw: Callable[[st.SearchStrategy[int]], int]) -> None:
        from hypothesis import strategies

        self._draw = draw
        self._integers = strategies.integers

    def between(self, low: int, high: int) -> int:
        """Draw any integer from ``low`` to ``high``."""
        return self._draw(self._integers(low, high))


def has_hypothesis() -> bool:
    """True if hypothesis can be imported."""
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        return False
    return True


def strategy_of(make: Callable[[Draws], Drawn], what: str) -> st.SearchStrategy[Drawn]:
    """Return a hypothesis strategy for a function's results; ``what`` is for the ImportError."""
    if not has_hypothesis():
        raise ImportError(MISSING.format(what=what))
    from hypothesis import strategies

    @strategies.composite
    def drawn(draw: strategies.DrawFn) -> Drawn:
        return make(HypothesisDraws(draw))

    return drawn()


def run_examples(
    test: Callable[[Draws, LayerContext], None],
    make: Callable[[Draws], LayerContext],
    *,
    shrink: bool,
) -> None:
    """Run a test of drawn layers on the fixed examples, then on those that hypothesis draws.

    With ``shrink`` hypothesis looks for the smallest layer that fails, and nothing else is run.
    """
    installed = has_hypothesis()
    if shrink and not installed:
        raise ImportError(MISSING.format(what="shrink=True"))
    fixed = 0 if shrink else FIRST if installed else ALONE
    for number in range(fixed):
        draws = FixedDraws(number)
        context = make(draws)
        try:
            test(draws, context)
        except Exception as error:
            error.add_note(f"{_shape(context)}; shrink=True searches for a smaller one")
            raise
    if installed:
        _run_hypothesis(test, make, shrink=shrink, before=fixed)


def _run_hypothesis(
    test: Callable[[Draws, LayerContext], None],
    make: Callable[[Draws], LayerContext],
    *,
    shrink: bool,
    before: int,
) -> None:
    """Run a property test on the remaining examples of hypothesis's profile."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    usual = settings()
    slow = () if shrink else (Phase.shrink, Phase.explain)

    @settings(
        usual,
        deadline=None,  # the part decides how slow an example is
        max_examples=max(usual.max_examples - before, 1),
        phases=[phase for phase in usual.phases if phase not in slow],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(data=st.data(), context=strategy_of(make, "a check"))
    def run(data: st.DataObject, context: LayerContext) -> None:
        test(HypothesisDraws(data.draw), context)

    run()


def _shape(context: LayerContext) -> str:
    """Describe the layer of an example in one line."""
    held = context.valid.sum(dim=-1).tolist()
    new = context.new_valid.sum(dim=-1).tolist()
    return (
        f"in layer {context.layer_idx} of {context.num_layers}: {context.query_heads} query heads, "
        f"{context.keys.dtype}, tokens of each row and KV head {held}, of these new {new}, read "
        f"so far {list(context.seen_len)}"
    )
