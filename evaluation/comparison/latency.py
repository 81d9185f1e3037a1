"""Measure how long prefill and decoding take; policies take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

import attrs
import torch

from kvpolicy.evaluation.comparison.speed import MIN_ROUNDS, Speed
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
        rounds: In which rounds they were measured, from 0; by default in the first ones.
    """

    wall_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]
    rounds: tuple[int, ...] = attrs.field()

    @rounds.default
    def _first_rounds(self) -> tuple[int, ...]:
        return tuple(range(len(self.wall_ms)))

    @property
    def median_ms(self) -> float:
        """The median over rounds of the wall time, in milliseconds."""
        return median(self.wall_ms)

    def speedups(self, baseline: Phase) -> tuple[float, ...]:
        """Return, per round, the baseline's time divided by this policy's; above 1 is faster.

        Raises:
            ValueError: The baseline was not measured in each of this policy's rounds.

        Example:
            >>> slow, fast = Phase((10.0, 30.0), (0.0, 0.0)), Phase((5.0, 10.0), (0.0, 0.0))
            >>> fast.speedups(slow)
            (2.0, 3.0)
        """
        before = dict(zip(baseline.rounds, baseline.wall_ms, strict=True))
        if not set(self.rounds) <= set(before):
            raise ValueError(
                f"baseline must have the same rounds, {len(self.wall_ms)}, got "
                f"{len(baseline.wall_ms)}"
            )
        return tuple(
            before[number] / ours for number, ours in zip(self.rounds, self.wall_ms, strict=True)
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
    again: int = 0,
    warm_up_tokens: int | None = None,
    processor_time: bool = False,
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
        again: Further rounds, at most, of the policies whose speeds are not steady after these
            (see `Speed.steady`), with the baseline.
        warm_up_tokens: First tokens of the prompt that the round before the first reads; None for
            the whole prompt.
        processor_time: Measure the process's processor time in place of time on the clock, also of
            ``seconds``, and of decoded tokens the median in place of the mean. On one thread of an
            idle processor they are the same, and on a busy one they vary far less.
        progress: Told of every turn.

    Raises:
        ValueError: ``rounds`` or ``new_tokens`` is below 1.
    """
    if rounds < 1 or new_tokens < 1:
        raise ValueError(f"rounds and new_tokens must be at least 1, got {rounds} and {new_tokens}")
    prompt = torch.tensor([list(input_ids)], device=model.device)
    contenders = [None, *policies.values()]
    race = _Race(model, prompt, contenders, new_tokens, processor_time, progress)
    everyone = range(len(contenders))
    clock = time.process_time if processor_time else time.perf_counter
    start = clock()

    def late() -> bool:
        return seconds is not None and clock() - start > seconds

    race.warm_up(warm_up_tokens)
    for number in range(rounds):
        if number and late():
            break
        race.round(number, everyone, "timing, in turns", rounds)
    for number in range(rounds, rounds + again):
        unsteady = race.unsteady() if rounds >= MIN_ROUNDS else []
        if not unsteady or late():
            break
        race.round(number, [0, *unsteady], "timing again what was unsteady", rounds + again)
    baseline, *others = race.timings()
    return Latencies(baseline, dict(zip(policies, others, strict=True)))


@attrs.define
class _Race:
    """Policies that take turns at one prompt, and the times of their turns.

    Args:
        model: The model.
        prompt: Its tokens, with a batch axis.
        contenders: The policies; None for the model without one, which is the baseline.
        new_tokens: Tokens decoded in a turn.
        processor_time: Whether processor time stands for time on the clock.
        progress: Told of every turn.
        turns: For each contender, its turns by the number of their round.
    """

    model: PreTrainedModel
    prompt: Tensor
    contenders: list[CachePolicy | None]
    new_tokens: int
    processor_time: bool
    progress: Progress
    turns: list[dict[int, _Turn]] = attrs.field()

    @turns.default
    def _no_turns(self) -> list[dict[int, _Turn]]:
        return [{} for _ in self.contenders]

    def warm_up(self, tokens: int | None) -> None:
        """Give each contender a turn at the start of the prompt that is not counted."""
        for done, contender in enumerate(self.contenders):
            self.progress("timing, first a round that is not counted", done, len(self.contenders))
            _take_turn(self.model, self.prompt[:, :tokens], contender, self.new_tokens)

    def round(self, number: int, indices: Sequence[int], stage: str, rounds: int) -> None:
        """Give contenders one turn each; every round starts with the next of them."""
        for step in range(len(indices)):
            self.progress(stage, number * len(indices) + step, rounds * len(indices))
            index = indices[(number + 1 + step) % len(indices)]
            turn = _take_turn(
                self.model,
                self.prompt,
                self.contenders[index],
                self.new_tokens,
                self.processor_time,
            )
            self.turns[index][number] = turn.by_processor if self.processor_time else turn

    def timings(self) -> list[Timing]:
        """Return the contenders' times so far, the baseline's first."""
        return [_summary(turns) for turns in self.turns]

    def unsteady(self) -> list[int]:
        """Return the contenders of which a speed over the baseline is not steady."""
        before, *others = self.timings()
        return [
            index
            for index, each in enumerate(others, start=1)
            if not each.prefill.speed(before.prefill).steady
            or not each.decode.speed(before.decode).steady
        ]


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

    @property
    def by_processor(self) -> _Turn:
        """The turn with processor time in place of time on the clock."""
        return _Turn((self.prefill[1],) * 2, (self.decode[1],) * 2, self.held)


def _take_turn(
    model: PreTrainedModel,
    prompt: Tensor,
    policy: CachePolicy | None,
    new_tokens: int,
    token_by_token: bool = False,
) -> _Turn:
    from transformers import DynamicCache

    from kvpolicy.integrations.transformers import PolicyCache

    cache: PolicyCache | DynamicCache
    cache = DynamicCache(config=model.config) if policy is None else PolicyCache(policy)
    attached = cache.attached(model) if isinstance(cache, PolicyCache) else nullcontext()
    with attached, torch.inference_mode():
        token, prefill = _timed(model, lambda: _next_token(model, prompt, cache))
        held = cache.report().total if isinstance(cache, PolicyCache) else None

        def decode(count: int) -> Tensor:
            nonlocal token
            for _ in range(count):
                token = _next_token(model, token, cache)
            return token

        # At once, or one by one, where one that another program delays is not to count.
        count = 1 if token_by_token else new_tokens
        times = [_timed(model, lambda: decode(count))[1] for _ in range(new_tokens // count)]
    wall, cpu = (median(each) / count for each in zip(*times, strict=True))
    return _Turn(prefill, (wall, cpu), held)


def _next_token(model: PreTrainedModel, input_ids: Tensor, cache: Any) -> Tensor:
    from kvpolicy.integrations.transformers.surface import CACHE  # slow to import

    output = model(input_ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
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


def _summary(turns: Mapping[int, _Turn]) -> Timing:
    numbers, taken = tuple(turns), list(turns.values())
    return Timing(
        prefill=_phase([turn.prefill for turn in taken], numbers),
        decode=_phase([turn.decode for turn in taken], numbers),
        held=taken[-1].held,
    )


def _phase(times: Sequence[tuple[float, float]], rounds: tuple[int, ...]) -> Phase:
    return Phase(tuple(wall for wall, _ in times), tuple(cpu for _, cpu in times), rounds)
