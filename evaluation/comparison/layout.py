"""Lay out the comparison's table as lines of text, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicy.evaluation.comparison.sentences import chance
from kvpolicy.evaluation.comparison.shown import Line, Shown
from kvpolicy.evaluation.comparison.speed import MIN_ROUNDS
from kvpolicy.evaluation.comparison.tables import byte_unit

WIDTH = 80
_NUMBER = 7
_GAP = "   "
NO_SPEED = "-"


def comparison_table(shown: Shown) -> list[str]:
    """Return all lines of a comparison's table: a header, and a line for each policy.

    A policy's name that leaves the numbers no room gets a line of its own.
    """
    unit, size = byte_unit(shown.full_bytes)
    groups = ["right answers", "cache held", "times as fast"]
    columns = [[each.words for each in shown.budgets] or ["all"], [unit, "%"]]
    columns.append(["prefill", "decode"])
    widths = [
        max(_NUMBER, -(-len(title) // len(each)), *map(len, each))
        for title, each in zip(groups, columns, strict=True)
    ]
    spans = [width * len(each) for width, each in zip(widths, columns, strict=True)]
    room = WIDTH - sum(spans) - len(_GAP) * len(spans)
    longest = max(len("policy"), *(len(line.name) for line in shown.lines))
    name = max(min(longest, room), len("policy"))

    def joined(first: str, cells: Sequence[str]) -> str:
        return _GAP.join([first.ljust(name), *cells]).rstrip()

    titles = [title.rjust(span) for title, span in zip(groups, spans, strict=True)]
    heads = [
        "".join(each.rjust(width) for each in row)
        for row, width in zip(columns, widths, strict=True)
    ]
    table = [joined("", titles), joined("policy", heads)]
    for line in shown.lines:
        cells = [
            "".join(cell.rjust(width) for cell in row)
            for row, width in zip(_cells(line, shown, size), widths, strict=True)
        ]
        table += (
            [joined(line.name, cells)]
            if len(line.name) <= name
            else [
                line.name,
                joined("", cells),
            ]
        )
    return table


def comparison_legend(shown: Shown, data: Mapping[str, Any], asked: str) -> list[str]:
    """Return text on what the table's columns mean.

    Args:
        shown: What the table shows.
        data: The comparison that it was chosen from.
        asked: The prompts, in words.
    """
    kept = f"keeping {' or '.join(each.words for each in shown.budgets)} of their tokens"
    legend = [
        f"right answers: % of {asked}{', ' + kept if shown.budgets else ''}; "
        f"95% interval at most ±{100 * chance(shown.prompts):.0f}.",
    ]
    at = f", at {shown.budget.words}" if shown.budget and len(shown.budgets) > 1 else ""
    model = data["timed_model"]
    timed = f"{model} on that prompt" if model else "on that prompt"
    clock = "processor time, " if data["processor_time"] else ""
    counts = [len(row["prefill"]["rounds_ms"]) for row in data["rows"] if row["prefill"]]
    # Full context takes part in all rounds, also in those that few others take part in.
    rounds = min(counts)
    legend += [
        f"cache held: keys and values of a prompt of {data['timed_tokens']:,} tokens{at}; "
        "% of full context's.",
        f"times as fast: {timed}{at}, against the same model without kvpolicy; "
        f"{clock}median of {'at least ' * (max(counts) > rounds)}{rounds} "
        f"round{'s' * (rounds > 1)}.",
    ]
    if model:
        legend.append(
            "These prompts end with their question. Policies for other uses, such as documents "
            "that are read before the question: docs/methods/README.md."
        )
    if shown.unsteady:
        legend.append(
            f"{NO_SPEED}: no speed, since rounds disagree or are fewer than {MIN_ROUNDS}."
        )
    return legend


def _cells(line: Line, shown: Shown, size: int) -> list[list[str]]:
    budgets = list(shown.budgets) or list(line.right)
    digits = 0 if size == 1 or shown.full_bytes >= 100 * size else 2
    right = [f"{100 * line.right[each]:.0f}" if each in line.right else "" for each in budgets]
    held = f"{line.held_bytes / size:.{digits}f}"
    return [
        right,
        [held, f"{100 * line.share:.1f}"],
        [speed_text(line.prefill), speed_text(line.decode)],
    ]


def speed_text(speed: float | None) -> str:
    """Return a speed as text such as ``"2.05"``; ``"-"`` if there is none to rely on."""
    return NO_SPEED if speed is None else f"{speed:.2f}"
