"""Measure how long prefill and decoding take; policies take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

import attrs
import torch

from kvpolicy.evaluation.comparison.speed import Speed
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.policy import CachePolicy

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedModel

    from kvpolicy.integrations.transformers import PolicyCache
    from kvpolicy.integrations.transformers.state.report import LayerReport


@attrs.frozen
class Phase:
    """The measured times of prefill or of decoding, one per round.

    Args:
        wall_ms: Milliseconds on the clock.
        cpu_ms: Milliseconds of processor time, summed over threads.
    """

    wall_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The median over rounds of the wall time, in milliseconds."""
        return median(self.wall_ms)

    def speedups(self, baseline: Phase) -> tuple[float, ...]:
        """Return, per round, the baseline's time divided by this policy's; above 1 is faster.

        Raises:
            ValueError: The two were not measured in the same rounds.

        Example:
            >>> slow, fast = Phase((10.0, 30.0), (0.0, 0.0)), Phase((5.0, 10.0), (0.0, 0.0))
            >>> fast.speedups(slow)
            (2.0, 3.0)
        """
        if len(self.wall_ms) != len(baseline.wall_ms):
            raise ValueError(
                f"baseline must have the same rounds, {len(self.wall_ms)}, got "
                f"{len(baseline.wall_ms)}"
            )
        return tuple(
            theirs / ours for ours, theirs in zip(self.wall_ms, baseline.wall_ms, strict=True)
        )

    def speed(self, baseline: Phase) -> Speed:
        """Return the speed-ups over a baseline as a `Speed`, with median and interval."""
        return Speed(self.speedups(baseline))

    def speedup(self, baseline: Phase) -> float:
        """Return the median speed-up over a baseline, even if the rounds vary much."""
        return self.speed(baseline).median


@attrs.frozen
class Timing:
    """One policy's prefill and decoding times, and the tokens its cache holds after prefill.

    Args:
        prefill: Reading the prompt, up to the first token.
        decode: One token after that, the mean of a round's.
        held: What the cache holds after prefill; None without a policy.
    """

    prefill: Phase
    decode: Phase
    held: LayerReport | None


@attrs.frozen
class Latencies:
    """Times of a baseline and several policies, whose measuring rounds were interleaved.

    Args:
        baseline: The model without kvpolicy, on Transformers' own cache.
        timings: One for each policy, by its label.
    """

    baseline: Timing
    timings: dict[str, Timing]


def measure_latency(
    model: PreTrainedModel,
    input_ids: Sequence[int],
    policies: Mapping[str, CachePolicy],
    *,
    rounds: int = 9,
    new_tokens: int = 32,
    seconds: float | None = None,
    progress: Progress = silent,
) -> Latencies:
    """Time prefill and decoding of one prompt under several policies, at batch size 1.

    In every round each policy has one turn, and so does the model without kvpolicy, so that a
    machine that becomes slower affects all of them. Each round starts with the next policy. One
    round is run first and not counted. On CUDA the device is synchronised before the clock is read.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: The prompt.
        policies: By label.
        rounds: Rounds counted, at least 1.
        new_tokens: Tokens decoded in each, at least 1.
        seconds: After which no further round is begun, however few there were; one there always
            is. None for no limit.
        progress: Told of every turn.

    Raises:
        ValueError: ``rounds`` or ``new_tokens`` is below 1.
    """
    if rounds < 1 or new_tokens < 1:
        raise ValueError(f"rounds and new_tokens must be at least 1, got {rounds} and {new_tokens}")
    contenders: list[CachePolicy | None] = [None, *policies.values()]
    prompt = torch.tensor([list(input_ids)], device=model.device)
    turns: list[list[_Turn]] = [[] for _ in contenders]
    start = time.perf_counter()
    for number in range(rounds + 1):
        if number > 1 and seconds is not None and time.perf_counter() - start > seconds:
            break
        for step in range(len(contenders)):
            done = number * len(contenders) + step
            progress("timing, in turns", done, (rounds + 1) * len(contenders))
            index = (number + step) % len(contenders)
            turn = _take_turn(model, prompt, contenders[index], new_tokens)
            if number:
                turns[index].append(turn)
    baseline, *others = [_summary(taken) for taken in turns]
    return Latencies(baseline, dict(zip(policies, others, strict=True)))


def held_after_prefill(
    model: PreTrainedModel, input_ids: Sequence[int], policy: CachePolicy
) -> LayerReport:
    """Return what a policy's cache holds, over all layers, after one prompt is read.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: The prompt.
        policy: Which tokens to keep.
    """
    from kvpolicy.integrations.transformers import PolicyCache

    cache = PolicyCache(policy)
    prompt = torch.tensor([list(input_ids)], device=model.device)
    with cache.attached(model), torch.inference_mode():
        _next_token(model, prompt, cache)
    return cache.report().total


@attrs.frozen
class _Turn:
    prefill: tuple[float, float]
    decode: tuple[float, float]
    held: LayerReport | None


def _take_turn(
    model: PreTrainedModel, prompt: Tensor, policy: CachePolicy | None, new_tokens: int
) -> _Turn:
    from transformers import DynamicCache

    from kvpolicy.integrations.transformers import PolicyCache

    cache: PolicyCache | DynamicCache
    cache = DynamicCache(config=model.config) if policy is None else PolicyCache(policy)
    attached = cache.attached(model) if isinstance(cache, PolicyCache) else nullcontext()
    with attached, torch.inference_mode():
        token, prefill = _timed(model, lambda: _next_token(model, prompt, cache))
        held = cache.report().total if isinstance(cache, PolicyCache) else None

        def decode() -> Tensor:
            latest = token
            for _ in range(new_tokens):
                latest = _next_token(model, latest, cache)
            return latest

        _, (wall, cpu) = _timed(model, decode)
    return _Turn(prefill, (wall / new_tokens, cpu / new_tokens), held)


def _next_token(model: PreTrainedModel, input_ids: Tensor, cache: Any) -> Tensor:
    output = model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return torch.as_tensor(output.logits[:, -1:].argmax(dim=-1))


def _timed(model: PreTrainedModel, run: Callable[[], Tensor]) -> tuple[Tensor, tuple[float, float]]:
    """Call a function; return its result, and its wall and CPU time in milliseconds."""
    on_cuda = model.device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(model.device)
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    if on_cuda:
        torch.cuda.synchronize(model.device)
    return result, ((time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3)


def _summary(turns: Sequence[_Turn]) -> Timing:
    return Timing(
        prefill=_phase([turn.prefill for turn in turns]),
        decode=_phase([turn.decode for turn in turns]),
        held=turns[-1].held,
    )


def _phase(times: Sequence[tuple[float, float]]) -> Phase:
    return Phase(tuple(wall for wall, _ in times), tuple(cpu for _, cpu in times))
