"""Measure how long a model reads and decodes under policies that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import attrs
import torch
from transformers import DynamicCache

from kvpolicy.evaluation.intervals import median_interval
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.scoring import append
from kvpolicy.evaluation.variant import naming
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policy import CachePolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of the median: the width of its interval up to which rounds are said to agree.
STEADY = 0.2
_COVERAGE = 0.9
# Tokens that every policy reads before the first round that counts.
_WARM_UP = 256


@attrs.frozen
class Ratio:
    """A policy's time over full context's in every round, at least one; below 1 is faster.

    Example:
        >>> Ratio((0.5, 0.51, 0.5, 0.49, 0.5)).text, Ratio((0.5,)).text
        ('0.50', '0.50?')
    """

    rounds: tuple[float, ...] = attrs.field(validator=attrs.validators.min_len(1))

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return median(self.rounds)

    @property
    def steady(self) -> bool:
        """True if the median's 90% interval exists and is at most a fifth of the median wide.

        The interval is two of the rounds themselves, which asks for no distribution; fewer than
        five rounds have none.
        """
        interval = median_interval(self.rounds, _COVERAGE)
        return interval is not None and interval[1] - interval[0] <= STEADY * self.median

    @property
    def text(self) -> str:
        """The median, with a ``?`` if the rounds do not agree."""
        return f"{self.median:.2f}{'' if self.steady else '?'}"


@attrs.frozen
class Times:
    """How long one policy took, a number for each round.

    Seconds of reading a prompt and of a decoded token, the mean of a round's; and processor
    seconds, all threads together.
    """

    prefill: tuple[float, ...] = ()
    decode: tuple[float, ...] = ()
    prefill_cpu: tuple[float, ...] = ()
    decode_cpu: tuple[float, ...] = ()

    def ratio(self, full: Times, what: str) -> Ratio:
        """Return one of the times over full context's in the same rounds."""
        own, base = getattr(self, what), getattr(full, what)
        return Ratio(
            tuple(ours / max(theirs, 1e-9) for ours, theirs in zip(own, base, strict=True))
        )


def measure_times(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    policies: Mapping[str, CachePolicy | None],
    *,
    new_tokens: int = 16,
    progress: Progress = silent,
) -> dict[str, Times]:
    """Time prefill and decoding, batch 1; in each round every policy reads the same prompt.

    There is a prompt for each round. The policy None is the model without kvpolicy, on
    Transformers' own cache. A ValueError of a policy that cannot be applied begins with its name.
    """
    found = {name: Times() for name in policies}
    for policy in policies.values():
        _timed(model, prompts[0][:_WARM_UP], policy, 1)
    order = list(policies.items())
    for number, ids in enumerate(prompts):
        for index, (name, policy) in enumerate(order):
            progress("times", number * len(order) + index, len(prompts) * len(order))
            with naming(name):
                once = _timed(model, ids, policy, new_tokens)
            before = attrs.astuple(found[name], recurse=False)
            found[name] = Times(*((*each, one) for each, one in zip(before, once, strict=True)))
        order = [*order[1:], order[0]]  # so that none always comes after the same other
    return found


@torch.no_grad()
def _timed(
    model: PreTrainedModel, ids: Sequence[int], policy: CachePolicy | None, new_tokens: int
) -> tuple[float, float, float, float]:
    cache = DynamicCache(config=model.config) if policy is None else PolicyCache(policy)
    prefill, logits = _clocked(model, lambda: append(model, cache, [ids], last=True))
    token = int(logits[0, -1].argmax())

    def decode() -> None:
        for _ in range(new_tokens):
            append(model, cache, [[token]])

    decoded, _ = _clocked(model, decode)
    wall, cpu = (each / new_tokens for each in decoded)
    return prefill[0], wall, prefill[1], cpu


def _clocked(model: PreTrainedModel, work: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """Return the seconds and processor seconds of some work, and what it returns."""
    _wait(model)
    start, cpu_start = time.perf_counter(), time.process_time()
    done = work()
    _wait(model)
    return (time.perf_counter() - start, time.process_time() - cpu_start), done


def _wait(model: PreTrainedModel) -> None:
    """Wait until a GPU has done its work, so that times are those of the work."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
