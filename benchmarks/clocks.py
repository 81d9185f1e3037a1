"""Measure times of calls and of a policy's decisions, and check deadlines."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from kvpolicy import CachePolicy, Decision, LayerContext
from kvpolicy.deferred_selection import DeferredLayer
from kvpolicy.part_calls import DeferredChecks

T = TypeVar("T")


class OutOfTimeError(Exception):
    """A measurement has run out of time."""


class Deadline:
    """A point in time after which a measurement has to end.

    Args:
        seconds: From now.
        clock: Tells the seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Return the seconds until the deadline; negative after it."""
        return self._end - self._clock()

    def within(self, seconds: float) -> Deadline:
        """Return the deadline so many seconds from now, or this one if it comes first."""
        return Deadline(min(self.left(), seconds), self._clock)

    def check(self) -> None:
        """Raise OutOfTimeError if the deadline has passed."""
        if self.left() < 0:
            raise OutOfTimeError


@attrs.frozen
class Interval:
    """The wall, CPU and device time of a piece of work.

    Args:
        wall_ms: Milliseconds on the clock; a GPU is waited for before the clock is read.
        cpu_ms: Milliseconds of processor time, summed over threads.
        device_ms: Milliseconds between two CUDA events around it; None without a GPU.
    """

    wall_ms: float
    cpu_ms: float
    device_ms: float | None = None


def timed(device: torch.device, run: Callable[[], T]) -> tuple[T, Interval]:
    """Run a function; return its result and times. A GPU is synchronised before and after."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        start, end = _event(), _event()
        torch.cuda.synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    if on_cuda:
        start.record()
    result = run()
    if on_cuda:
        end.record()
        torch.cuda.synchronize(device)
    wall_ms, cpu_ms = (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3
    return result, Interval(wall_ms, cpu_ms, start.elapsed_time(end) if on_cuda else None)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class TokenTimes:
    """A streamer of `generate` that records when the prompt and every token were done.

    Args:
        clock: Tells the seconds; the machine's clock if None.

    Attributes:
        seconds: The readings, the first at the start of the prompt.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.seconds: list[float] = []
        self._clock = clock or time.perf_counter

    def put(self, value: Tensor) -> None:
        """Record the time when the prompt, or one token of each row, was done."""
        self.seconds.append(self._clock())

    def end(self) -> None:
        """Do nothing; `generate` calls this after the last token."""

    def steps_ms(self, first: int = 0) -> list[float]:
        """Return the milliseconds between recorded times, from time ``first`` on.

        From reading 0 on, these are the time of the prefill, then that of each further token.
        """
        pairs = itertools.pairwise(self.seconds[first:])
        return [(after - before) * 1e3 for before, after in pairs]


class TimedPolicy(CachePolicy):
    """A policy that measures how long its decisions take.

    On a GPU the time is taken between CUDA events, without waiting. It covers scoring and choosing,
    and the waits that choosing causes. It does not cover the check of the parts' answers, which is
    one for all layers if the forward can wait for it, nor storing the chosen keys and values.

    Args:
        policy: The policy to time.
        device: The model's.
    """

    _on_cuda: bool
    _spans: list[tuple[Any, Any]]

    def __init__(self, policy: CachePolicy, device: torch.device) -> None:
        parts = policy.scorer, policy.selector, policy.propagation
        super().__init__(*parts, rereading=policy.rereading, gapless=policy.gapless)
        object.__setattr__(self, "_on_cuda", device.type == "cuda")
        object.__setattr__(self, "_spans", [])

    def decide(
        self,
        context: LayerContext,
        *,
        remembered: bool = False,
        checks: DeferredChecks | None = None,
        saliency: Tensor | None = None,
    ) -> Decision:
        """Decide as the wrapped policy does, and add the time; see `CachePolicy.decide`."""
        how: dict[str, Any] = {"remembered": remembered, "checks": checks, "saliency": saliency}
        return self._timed(lambda: super(TimedPolicy, self).decide(context, **how))

    def decide_layers(self, layers: Sequence[DeferredLayer]) -> list[Tensor]:
        """Choose as the wrapped policy does, and add the time; see `CachePolicy.decide_layers`."""
        return self._timed(lambda: super(TimedPolicy, self).decide_layers(layers))

    def decide_restart(
        self, context: LayerContext, saliency: Tensor | None = None
    ) -> Tensor | None:
        """Choose as the wrapped policy does, and add the time; see `CachePolicy.decide_restart`."""
        return self._timed(lambda: super(TimedPolicy, self).decide_restart(context, saliency))

    def total_ms(self) -> float:
        """Return the milliseconds of all decisions so far; synchronise the GPU first."""
        if self._on_cuda:
            return float(sum(start.elapsed_time(end) for start, end in self._spans))
        return float(sum(end - start for start, end in self._spans) * 1e3)

    def _timed(self, decide: Callable[[], T]) -> T:
        start = self._now()
        decision = decide()
        self._spans.append((start, self._now()))
        return decision

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = _event()
        event.record()
        return event
