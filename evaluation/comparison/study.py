"""Compare policies with full context on the same questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.evaluation.asking import Asked, check_fits
from kvpolicy.evaluation.cells import Cell, Compared, cells_of, compared
from kvpolicy.evaluation.comparison.times import Times, measure_times
from kvpolicy.evaluation.defaults import FULL_CONTEXT
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.scoring import Outcome, outcomes
from kvpolicy.evaluation.variant import Variant
from kvpolicy.policies import FullContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FULL = Variant(FULL_CONTEXT, FullContext())
ALL = "all"
"""The kind of a cell that sums up the questions of all kinds."""


@attrs.frozen
class Row:
    """One policy at one budget: what it did with all questions, and with those of each kind.

    ``difference`` is from full context, on the same questions; None for full context. ``times`` is
    None where it was not timed.
    """

    variant: Variant
    total: Cell
    kinds: dict[str, Cell]
    difference: Compared | None
    times: Times | None

    def as_data(self) -> dict[str, Any]:
        """Return the row as a dict for JSON."""
        data = {
            **self.variant.as_data(),
            "total": attrs.asdict(self.total),
            "kinds": {kind: attrs.asdict(cell) for kind, cell in self.kinds.items()},
        }
        if self.difference is not None:
            data["difference"] = attrs.asdict(self.difference)
        if self.times is not None:
            data["seconds"] = attrs.asdict(self.times)
        return data


@attrs.frozen
class Comparison:
    """Policies side by side on the same questions.

    There is a row for each policy and budget, full context first. ``later``: the question was asked
    after the policy had chosen. ``longest``: tokens of the longest prompt. ``finished``: all was
    measured that was asked for.
    """

    rows: tuple[Row, ...]
    outcomes: tuple[Outcome, ...]
    questions: int
    later: bool
    longest: int
    finished: bool = True

    @property
    def full(self) -> Row:
        """The row of full context."""
        return self.rows[0]

    def lost(self, row: Row) -> float:
        """Return how much less probable the right answer is than under full context.

        It is in nats for each token of the answer, the mean over the questions.
        """
        return self.full.total.log_prob - row.total.log_prob

    def as_data(self) -> dict[str, Any]:
        """Return the comparison as a dict for JSON."""
        return {
            "questions": self.questions,
            "later": self.later,
            "longest_prompt": self.longest,
            "finished": self.finished,
            "rows": [row.as_data() for row in self.rows],
            "outcomes": [attrs.asdict(each) for each in self.outcomes],
        }


def compare(
    model: PreTrainedModel,
    tokenizer: Any,
    questions: Sequence[Asked],
    variants: Sequence[Variant],
    *,
    later: bool = False,
    rounds: int = 5,
    new_tokens: int = 16,
    progress: Progress = silent,
    unfinished: Callable[[Comparison], None] | None = None,
) -> Comparison:
    """Compare policies with full context on the same questions.

    Each question is put to all policies before the next one. Then every policy is timed, at the
    largest of its budgets, on prompts that it reads alone.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        tokenizer: Its tokenizer.
        questions: At least one, see `kvpolicy.evaluation.tasks.task.Task.questions`.
        variants: The policies; full context is always measured.
        later: Whether a policy chooses before it knows the question.
        rounds: Prompts that are timed; with fewer than 5 no time counts as steady, 0 for none.
        new_tokens: Tokens decoded in each.
        progress: Told how far it is.
        unfinished: Called with what is there where the work is interrupted, before that is raised;
            not without a question that all policies have answered.

    Raises:
        ValueError: There are no questions, one does not fit into the model's positions, two
            variants have one label, or a policy does not fit the model.
    """
    chosen = [FULL, *(each for each in variants if each.name != FULL_CONTEXT)]
    labels = [variant.label for variant in chosen]
    if len(set(labels)) < len(labels):
        raise ValueError(f"variants must have different labels, got {', '.join(labels)}")
    check_fits(model, questions)
    for variant in chosen:
        variant.check_model(model.config.num_hidden_layers)
    policies = {each.label: None if each is FULL else each.policy for each in chosen}
    found: list[Outcome] = []
    times: dict[str, Times] = {}
    try:
        for each in outcomes(model, tokenizer, questions, policies, later=later, progress=progress):
            found.append(each)
        if rounds:
            timed = [questions[number % len(questions)] for number in range(rounds)]
            prompts = [it.document_ids + (() if later else it.question_ids) for it in timed]
            times = measure_times(
                model,
                prompts,
                {label: policies[label] for label in _largest(chosen)},
                new_tokens=new_tokens,
                progress=progress,
            )
    except KeyboardInterrupt:
        done = len(found) // len(chosen)
        if done and unfinished is not None:
            there = found[: done * len(chosen)]
            unfinished(_comparison(chosen, there, {}, questions, later, False))
        raise
    return _comparison(chosen, found, times, questions, later, True)


def _largest(chosen: Sequence[Variant]) -> list[str]:
    """Return the label of each policy at the largest of its budgets."""
    groups: dict[tuple[str, str], Variant] = {}
    for each in chosen:
        more = {key: it for key, it in each.parameters.items() if not key.startswith("retention")}
        key = each.name, str(sorted(more.items(), key=str)) if "tsp_layer" in more else ""
        before = groups.get(key)
        if before is None or _budget(before) <= _budget(each):
            groups[key] = each
    return [each.label for each in groups.values()]


def _budget(variant: Variant) -> float:
    return variant.retention_tokens or variant.retention_rate or 0.0


def _comparison(
    chosen: Sequence[Variant],
    found: Sequence[Outcome],
    times: dict[str, Times],
    questions: Sequence[Asked],
    later: bool,
    finished: bool,
) -> Comparison:
    cells = {(each.policy, each.kind): each for each in cells_of(found)}
    totals = {each.policy: each for each in cells_of(attrs.evolve(it, kind=ALL) for it in found)}
    kinds = dict.fromkeys(each.kind for each in found)
    rows = [
        Row(
            variant,
            totals[variant.label],
            {kind: cells[variant.label, kind] for kind in kinds},
            None if variant is FULL else compared(found, variant.label, FULL.label),
            times.get(variant.label),
        )
        for variant in chosen
    ]
    return Comparison(
        rows=tuple(rows),
        outcomes=tuple(found),
        questions=len(found) // len(chosen),
        later=later,
        longest=max(each.prompt_len for each in questions),
        finished=finished,
    )
