"""Compute confidence intervals of fractions, of medians and of paired differences."""

import math
from collections.abc import Sequence
from statistics import fmean

import attrs

_NORMAL_95 = 1.959964


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95% Wilson interval of a fraction, which also holds near 0 and 1.

    Example:
        >>> [round(bound, 3) for bound in share_interval(0.96, 100)]
        [0.902, 0.984]
    """
    spread = _NORMAL_95**2 / count
    middle = share + spread / 2
    half = math.sqrt(spread * (share * (1 - share) + spread / 4))
    return (max(middle - half, 0.0) / (1 + spread), min((middle + half) / (1 + spread), 1.0))


def median_interval(values: Sequence[float], coverage: float) -> tuple[float, float] | None:
    """Return the narrowest interval of a median with at least a coverage, None if there is none.

    It is two of the values, equally far from both ends in rank, which asks for no distribution.

    Example:
        >>> median_interval([1.0, 9.0, 2.0, 4.0, 3.0], 0.9), median_interval([1.0, 9.0], 0.9)
        ((1.0, 9.0), None)
    """
    ordered, count = sorted(values), len(values)
    left_out, outside = None, 0.0
    for index in range((count + 1) // 2):
        outside += 2 * math.comb(count, index) / 2**count
        if 1 - outside < coverage:
            break
        left_out = index
    return None if left_out is None else (ordered[left_out], ordered[count - 1 - left_out])


@attrs.frozen
class Difference:
    """The mean of a method's scores less full context's, with the ends of its 95% interval."""

    mean: float
    low: float
    high: float


def paired_difference(scores: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Return two methods' mean score difference on the same prompts, with its 95% interval.

    The interval is the normal one of the differences ``scores - baseline`` and of two more, one of
    1 and one of -1 (Bonett and Price, 2012, for scores of 0 and 1), cut to what differences of
    scores in [0, 1] can be. So it has a width where all prompts that were asked agree, which the
    normal interval and the bootstrap have not: ten prompts without a difference do not show that
    there is none. Nothing is drawn at random.

    Example:
        >>> found = paired_difference([1, 0, 0, 1], [1, 1, 1, 1])
        >>> found.mean, round(found.low, 2), round(found.high, 2)
        (-0.5, -0.93, 0.26)
    """
    if not scores or len(scores) != len(baseline):
        raise ValueError(
            "scores and baseline must have one entry for each prompt, at least one, got "
            f"{len(scores)} and {len(baseline)}"
        )
    differences = [own - full for own, full in zip(scores, baseline, strict=True)]
    extended = [*differences, 1.0, -1.0]
    middle = fmean(extended)
    variance = fmean((each - middle) ** 2 for each in extended)
    half = _NORMAL_95 * math.sqrt(variance / len(extended))
    return Difference(fmean(differences), max(middle - half, -1.0), min(middle + half, 1.0))
