"""Sum up outcomes of policies: rates with intervals, and paired differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median

import attrs

from kvpolicy.evaluation.intervals import (
    Difference,
    median_interval,
    paired_difference,
    share_interval,
)
from kvpolicy.evaluation.scoring import Outcome


@attrs.frozen
class Cell:
    """What one policy did with all questions of one kind.

    Args:
        policy: The policy's name.
        kind: The questions' kind.
        count: Number of questions.
        score: Mean score in [0, 1]; None if nothing was generated.
        interval: The score's 95% interval.
        log_prob: Mean over the questions of the right answer's log-probability for each token.
        divergence: Mean over the questions of the divergence from full context, in nats.
        kept: Fraction of the read tokens that a layer holds.
        held: Bytes that are held, as a fraction of full context's.
    """

    policy: str
    kind: str
    count: int
    score: float | None
    interval: tuple[float, float] | None
    log_prob: float
    divergence: float
    kept: float
    held: float


def cells_of(outcomes: Iterable[Outcome]) -> list[Cell]:
    """Sum up outcomes by policy and kind.

    Args:
        outcomes: As `kvpolicy.evaluation.scoring.outcomes` yields them: of each question, full
            context is the first.

    Returns:
        The cells, in the order in which kinds and policies first appear.
    """
    listed = list(outcomes)
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for each in listed:
        groups.setdefault((each.kind, each.policy), []).append(each)
    return [cell_of(policy, kind, group) for (kind, policy), group in groups.items()]


def cell_of(policy: str, kind: str, own: Sequence[Outcome]) -> Cell:
    """Sum up a policy's outcomes of one kind, at least one."""
    scores = [each.score for each in own if each.score is not None]
    score = fmean(scores) if scores else None
    return Cell(
        policy=policy,
        kind=kind,
        count=len(own),
        score=score,
        interval=None if score is None else share_interval(score, len(scores)),
        log_prob=fmean(each.log_prob / each.answer_len for each in own),
        divergence=fmean(each.divergence for each in own),
        kept=fmean(each.kept / each.seen for each in own),
        held=fmean(each.held_bytes / each.full_bytes for each in own),
    )


@attrs.frozen
class Compared:
    """How two policies differ on the same questions.

    Args:
        policy: The name of the one.
        other: The name of the other, such as full context.
        count: Number of questions.
        scores: Mean difference of their scores, with its 95% interval; None if nothing was
            generated.
        log_prob: Median difference of the right answer's log-probability for each token.
        log_prob_interval: The median's interval, of at least 95%; None with too few questions.
    """

    policy: str
    other: str
    count: int
    scores: Difference | None
    log_prob: float
    log_prob_interval: tuple[float, float] | None

    def __str__(self) -> str:
        said = [] if self.scores is None else [f"right answers {self._scores()}"]
        said.append(f"log-probability {self._log_prob()}")
        return f"{self.policy} and {self.other}, {self.count} questions: {'; '.join(said)}"

    def _scores(self) -> str:
        found = self.scores
        assert found is not None
        shown = f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
        return shown if found.clear else f"{shown}, no clear difference"

    def _log_prob(self) -> str:
        if self.log_prob_interval is None:
            return f"{self.log_prob:+.3f}, too few questions to tell"
        low, high = self.log_prob_interval
        shown = f"{self.log_prob:+.3f} [{low:+.3f}, {high:+.3f}]"
        return shown if low > 0 or high < 0 else f"{shown}, no clear difference"


def compared(outcomes: Iterable[Outcome], policy: str, other: str) -> Compared:
    """Compare two policies on the questions that both were asked, in the same order.

    Positive differences are in favour of the first.

    Raises:
        ValueError: One has no outcome, or they were asked different numbers of questions.
    """
    listed = list(outcomes)
    own, base = ([each for each in listed if each.policy == name] for name in (policy, other))
    if not own or len(own) != len(base):
        raise ValueError(
            f"outcomes must have as many questions of {policy} as of {other}, at least one, got "
            f"{len(own)} and {len(base)}"
        )
    pairs = [(one.score, two.score) for one, two in zip(own, base, strict=True)]
    scores = [(one, two) for one, two in pairs if one is not None and two is not None]
    gains = [
        one.log_prob / one.answer_len - two.log_prob / two.answer_len
        for one, two in zip(own, base, strict=True)
    ]
    return Compared(
        policy=policy,
        other=other,
        count=len(own),
        scores=paired_difference(*map(list, zip(*scores, strict=True))) if scores else None,
        log_prob=median(gains),
        log_prob_interval=median_interval(gains, 0.95),
    )
