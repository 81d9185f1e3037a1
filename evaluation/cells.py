"""Sum up outcomes of policies: rates with intervals, and paired differences."""

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
    """What one policy did with all questions of one kind: means over the questions.

    Args:
        policy: The policy's name.
        kind: The questions' kind.
        count: Number of questions.
        score: In [0, 1], with its 95% ``interval``; None if nothing was generated.
        log_prob: The right answer's log-probability for each token.
        divergence: From full context, in nats.
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
    """Sum up outcomes by policy and kind, in the order in which these first appear."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for each in outcomes:
        groups.setdefault((each.kind, each.policy), []).append(each)
    return [_cell(policy, kind, group) for (kind, policy), group in groups.items()]


def _cell(policy: str, kind: str, own: Sequence[Outcome]) -> Cell:
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
    """How two policies, such as the other full context, differ on the same ``count`` questions.

    ``scores`` is the mean difference of their scores, with its 95% interval; None if nothing was
    generated. ``log_prob`` is the median difference of the right answer's log-probability for each
    token, with an interval of at least 95%; None with too few questions.
    """

    policy: str
    other: str
    count: int
    scores: Difference | None
    log_prob: float
    log_prob_interval: tuple[float, float] | None

    def __str__(self) -> str:
        said = [f"log-probability {_shown(self.log_prob, self.log_prob_interval, 3)}"]
        if self.scores is not None:
            interval = self.scores.low, self.scores.high
            said.insert(0, f"right answers {_shown(self.scores.mean, interval, 2)}")
        return f"{self.policy} and {self.other}, {self.count} questions: {'; '.join(said)}"


def _shown(value: float, interval: tuple[float, float] | None, digits: int) -> str:
    shown = f"{value:+.{digits}f}"
    if interval is None:
        return f"{shown}, too few questions to tell"
    low, high = interval
    shown = f"{shown} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return shown if low > 0 or high < 0 else f"{shown}, no clear difference"


def compared(outcomes: Iterable[Outcome], policy: str, other: str) -> Compared:
    """Compare two policies on the questions that both were asked, in the same order.

    Positive differences are in favour of the first. It is a ValueError if one has no outcome, or
    they were asked different numbers of questions.
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
