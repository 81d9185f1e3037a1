"""Clocks of the benchmarks: how long something took, what a policy's part of it was, deadlines."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from kvpolicy import CachePolicy, Decision, LayerContext
from kvpolicy.asking import Checks
from kvpolicy.later import Undecided

T = TypeVar("T")


class OutOfTimeError(Exception):
    """The time that was given is over."""


class Deadline:
    """A point in time.

    Args:
        seconds: From now.
        clock: Tells the seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._end - self._clock()

    def check(self) -> None:
        """Raise OutOfTimeError if it is over."""
        if self.left() < 0:
            raise OutOfTimeError


@attrs.frozen
class Interval:
    """How long something took.

    Args:
        wall_ms: Milliseconds on the clock; a GPU is waited for before the clock is read.
        cpu_ms: Milliseconds of processor time, summed over threads.
        device_ms: Milliseconds between two CUDA events around it; None without a GPU.
    """

    wall_ms: float
    cpu_ms: float
    device_ms: float | None = None


def timed(device: torch.device, run: Callable[[], T]) -> tuple[T, Interval]:
    """Run, and return what came and how long it took; a GPU is waited for before and after."""
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
    """A streamer of `generate` that writes down when the prompt and every token came.

    Args:
        clock: Tells the seconds; the machine's clock if None.

    Attributes:
        seconds: The readings, the first at the start of the prompt.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.seconds: list[float] = []
        self._clock = clock or time.perf_counter

    def put(self, value: Tensor) -> None:
        """Take the prompt, or one token of each row."""
        self.seconds.append(self._clock())

    def end(self) -> None:
        """Nothing more comes."""

    def steps_ms(self, first: int = 0) -> list[float]:
        """Milliseconds between readings from the given one on.

        From 0 on they are the prefill's, then each further token's.
        """
        pairs = itertools.pairwise(self.seconds[first:])
        return [(after - before) * 1e3 for before, after in pairs]


class TimedPolicy(CachePolicy):
    """A policy that also says how long its decisions take.

    On a GPU between CUDA events, without waiting: scoring and choosing, and what waits choosing
    brings. The look at the parts' answers, one for all layers where the forward can wait for it,
    and taking the chosen keys and values into the cache are not part of it.

    Args:
        policy: The policy to time.
        device: The model's.
    """

    _on_cuda: bool
    _spans: list[tuple[Any, Any]]

    def __init__(self, policy: CachePolicy, device: torch.device) -> None:
        parts = policy.scorer, policy.selector, policy.propagation
        super().__init__(*parts, reading=policy.reading, gapless=policy.gapless)
        object.__setattr__(self, "_on_cuda", device.type == "cuda")
        object.__setattr__(self, "_spans", [])

    def decide(
        self, context: LayerContext, *, remembered: bool = False, checks: Checks | None = None
    ) -> Decision:
        """The policy's decision; see `CachePolicy.decide`."""
        how: dict[str, Any] = {"remembered": remembered, "checks": checks}
        return self._timed(lambda: super(TimedPolicy, self).decide(context, **how))

    def decide_layers(self, layers: Sequence[Undecided]) -> list[Tensor]:
        """The policy's choice for all layers; see `CachePolicy.decide_layers`."""
        return self._timed(lambda: super(TimedPolicy, self).decide_layers(layers))

    def decide_restart(self, context: LayerContext) -> Tensor | None:
        """The policy's choice; see `CachePolicy.decide_restart`."""
        return self._timed(lambda: super(TimedPolicy, self).decide_restart(context))

    def total_ms(self) -> float:
        """Milliseconds of all decisions so far, once the GPU has been waited for."""
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
