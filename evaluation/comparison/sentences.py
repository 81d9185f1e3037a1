"""Say in plain words what a comparison shows."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.evaluation.comparison.shown import Budget, Line, Shown

# Of the prompts: how far below full context a policy still counts as answering as well.
_CLOSE = 0.05
# Speeds within this of 1 are called the same.
_SAME = 0.1


def sentences(shown: Shown) -> list[str]:
    """Return three sentences on accuracy, memory and speed; fewer where there is nothing to say.

    Everything in them is computed from the lines of the table.
    """
    full, *others = shown.lines
    if not others or not shown.budgets or shown.budget is None:
        return []
    if _right(full, shown.budget) <= _CLOSE:
        right = _percent(_right(full, shown.budget))
        return [
            f"Full context answers {right} of the prompts right. The model cannot answer these "
            "prompts, so they cannot compare policies."
        ]
    good = [
        line for line in others if _right(line, shown.budget) >= _right(full, shown.budget) - _CLOSE
    ]
    said = [_which_tokens(shown, others), _memory(shown, full, others, good)]
    return [*said, _speed(good or others, among_good=bool(good))]


def _which_tokens(shown: Shown, others: Sequence[Line]) -> str:
    """Compare the best with the worst policy at the smallest budget."""
    small = shown.budgets[0]
    having = [line for line in others if small in line.right]
    best = max(having, key=lambda line: line.right[small])
    worst = min(having, key=lambda line: line.right[small])
    high, low = best.right[small], worst.right[small]
    if high == low:
        return (
            f"Keeping {small.of_prompt}, every policy answers {_percent(low)} of the "
            f"{shown.prompts} prompts right."
        )
    if high - low <= 2 * chance(shown.prompts):
        return (
            f"Keeping {small.of_prompt}, policies answer {_percent(low)} to {_percent(high)} of "
            f"{shown.prompts} prompts right: too few prompts to tell them apart."
        )
    return (
        f"It matters which tokens are kept: keeping {small.of_prompt}, {best.name} answers "
        f"{_percent(high)} of the prompts right and {worst.name} {_percent(low)}."
    )


def _memory(shown: Shown, full: Line, others: Sequence[Line], good: Sequence[Line]) -> str:
    """Say how many policies answer nearly as well as full context, and what they hold."""
    budget = shown.budget
    assert budget is not None
    right = _percent(_right(full, budget))
    if not good:
        most = max(_right(line, budget) for line in others)
        best = [line.name for line in others if _right(line, budget) == most]
        who = f"the best is {best[0]} with" if len(best) == 1 else f"{', '.join(best)} have"
        return (
            f"At {budget.words} no policy comes within {100 * _CLOSE:.0f} points of full context's "
            f"{right}; {who} {_percent(most)}."
        )
    shares = sorted(line.share for line in good)
    low, high = _percent(shares[0]), _percent(shares[-1])
    held = low if low == high else f"{low} to {high}"
    verb = "policy answers" if len(others) == 1 else "policies answer" + "s" * (len(good) == 1)
    return (
        f"At {budget.words}, {len(good)} of {len(others)} {verb} as many right as full context "
        f"({right}, or at most {100 * _CLOSE:.0f} points less) with {held} of its cache."
    )


def _speed(lines: Sequence[Line], *, among_good: bool) -> str:
    """Say which policy reads prompts fastest and how fast it decodes, as far as that is known."""
    who = "Fastest of these" if among_good else "Fastest of all"
    reading = [line for line in lines if line.prefill is not None]
    decoding = [line for line in lines if line.decode is not None]
    if not reading and not decoding:
        return "No speed can be relied on: rounds disagree, or are too few. Is the machine busy?"
    fastest = max(reading, key=lambda line: line.prefill or 0.0, default=None)
    if fastest is not None and (fastest.prefill or 0.0) >= 1 + _SAME:
        decodes = fastest.decode
        more = "" if decodes is None else f" and decodes {decodes:.1f} times as fast"
        return (
            f"{who} is {fastest.name}: it reads the prompt {fastest.prefill:.1f} times as fast as "
            f"full context{more}."
        )
    said = ["none of them reads the prompt much faster than full context"] if reading else []
    if decoding:
        most = max(decoding, key=lambda line: line.decode or 0.0)
        gains = (most.decode or 0.0) >= 1 + _SAME
        said.append(
            f"{most.name} decodes {most.decode:.1f} times as fast"
            if gains
            else "none decodes much faster; the prompts may be too short for that"
        )
    return f"Speed: {'; '.join(said)}."


def _right(line: Line, budget: Budget) -> float:
    return line.right.get(budget, 0.0)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def chance(prompts: int) -> float:
    """Return half the width, at most, of a 95% interval of a fraction of so many prompts."""
    return float(0.98 / prompts**0.5)
