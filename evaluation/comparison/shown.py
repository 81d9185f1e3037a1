"""Choose what a comparison shows: the lines of its table, which its picture shows as well.

Made from the numbers of ``compare.json`` alone, so that a file can be shown again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvpolicy.evaluation.comparison.speed import Speed
from kvpolicy.evaluation.variant import Variant

# Memory and speed are shown at one rate, the one nearest to this, which papers report first.
_SPEED_RATE = 0.1


@attrs.frozen(order=True)
class Budget:
    """How much a policy keeps: a fraction of the context, or a number of tokens.

    Args:
        rate: The fraction; None if it is a number of tokens.
        tokens: The number of tokens; 0 if it is a fraction.

    Example:
        >>> Budget(0.05).words, Budget(None, 512).words
        ('5%', '512 tok')
    """

    rate: float | None
    tokens: int = 0

    @property
    def words(self) -> str:
        """The budget as the header of a column."""
        return f"{self.tokens:,} tok" if self.rate is None else f"{100 * self.rate:.3g}%"

    @property
    def of_prompt(self) -> str:
        """The budget as words of a sentence."""
        if self.rate is None:
            return f"{self.tokens:,} tokens"
        return f"{self.words} of a prompt's tokens"


@attrs.frozen
class Line:
    """One policy, as the table and the picture show it.

    Args:
        name: The policy's.
        right: Fraction of the prompts answered exactly, by budget.
        held_bytes: Of keys and values, after prefill.
        share: These over all of the prompt's.
        prefill: Times as fast as full context; None if the rounds disagree.
        decode: Likewise, for decoded tokens.
    """

    name: str
    right: dict[Budget, float]
    held_bytes: int
    share: float
    prefill: float | None
    decode: float | None


@attrs.frozen
class Shown:
    """A comparison, as the table and the picture show it.

    Args:
        lines: Full context first, then by accuracy, at the smallest budget first, then by speed.
        budgets: Of the accuracies, ascending.
        budget: Of bytes and speeds; None if no policy has a budget.
        prompts: The number of prompts asked.
        full_bytes: Bytes of the keys and values of all of the prompt's tokens.
    """

    lines: tuple[Line, ...]
    budgets: tuple[Budget, ...]
    budget: Budget | None
    prompts: int
    full_bytes: int

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Shown:
        """Choose what to show of a comparison.

        Args:
            data: As `Comparison.as_data` makes it, or a file of results holds it.
        """
        rows = data["rows"]
        budgets = sorted({each for each in map(_budget, rows) if each}, key=_size)
        budget = speed_budget(budgets)
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            groups.setdefault(row["policy"], []).append(row)
        full, *others = [_line(each, budgets, budget, rows[0]) for each in groups.values()]
        others.sort(key=lambda line: (*_falling(line), line.name))
        scores = rows[0]["exact_match"].values()
        prompts = sum(score["count"] for score in scores)
        return cls((full, *others), tuple(budgets), budget, prompts, rows[0]["kv_bytes"]["full"])

    @property
    def unsteady(self) -> bool:
        """True if a speed is left out, since its rounds disagree."""
        return any(None in (line.prefill, line.decode) for line in self.lines)


def speed_budget(budgets: Sequence[Budget]) -> Budget | None:
    """Return the budget that bytes and speeds are shown at: nearest to 10%, or most tokens."""
    rates = [each for each in budgets if each.rate is not None]
    if rates:
        return min(rates, key=lambda each: abs((each.rate or 0.0) - _SPEED_RATE))
    return max(budgets, key=_size, default=None)


def timed_labels(variants: Iterable[Variant]) -> list[str]:
    """Return the labels of the variants whose bytes and speeds are shown."""
    budgets = {each.label: _budget(attrs.asdict(each, recurse=False)) for each in variants}
    at = speed_budget([each for each in budgets.values() if each])
    return [label for label, budget in budgets.items() if budget in (None, at)]


def _budget(row: Mapping[str, Any]) -> Budget | None:
    if row["retention_tokens"] is not None:
        return Budget(None, row["retention_tokens"])
    rate = row["retention_rate"]
    return None if rate is None else Budget(rate)


def _size(budget: Budget) -> tuple[float, int]:
    return (budget.rate or 0.0, budget.tokens)


def _line(
    rows: Sequence[Mapping[str, Any]],
    budgets: Sequence[Budget],
    budget: Budget | None,
    full: Mapping[str, Any],
) -> Line:
    at: dict[Budget | None, Mapping[str, Any]] = {_budget(row): row for row in rows}
    # Without a budget of its own a policy answers the same, whatever the others keep.
    timed = at.get(budget, rows[-1])
    columns: Sequence[Budget] = budgets or (Budget(1.0),)
    by_budget = {each: at.get(each, at.get(None)) for each in columns}
    known = {each: row for each, row in by_budget.items() if row is not None}
    baseline = timed is full
    return Line(
        timed["policy"],
        {each: _pooled(row["exact_match"]) for each, row in known.items()},
        timed["kv_bytes"]["held"],
        timed["kv_bytes"]["share"],
        *(1.0 if baseline else _steady(timed[phase]) for phase in ("prefill", "decode")),
    )


def _pooled(scores: Mapping[str, Mapping[str, Any]]) -> float:
    counts = [score["count"] for score in scores.values()]
    return float(sum(score["matches"] for score in scores.values()) / sum(counts))


def _steady(phase: Mapping[str, Any]) -> float | None:
    speed = Speed(tuple(phase["rounds_speedup"]))
    return speed.median if speed.steady else None


def _falling(line: Line) -> tuple[float, ...]:
    right = (-share for share in line.right.values())
    return (*right, -(line.prefill or 0.0) - (line.decode or 0.0))
