"""Time a prompt and its answer: in a loop of forwards, or in `generate`, on a CPU or a GPU."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, PreTrainedModel, StaticCache

from kvpolicy import CachePolicy, Decision, LayerContext
from kvpolicy.decision import DeferredLayer
from kvpolicy.integrations.transformers import PolicyCache

T = TypeVar("T")
# How a cache holds what `generate` decodes.
GROWING, FIXED, COMPILED = "growing", "fixed", "compiled"


class OutOfTimeError(Exception):
    """A measurement has run out of time."""


class Deadline:
    """A point in time, so many seconds from now, after which a measurement has to end."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        return self._end - self._clock()

    def within(self, seconds: float) -> Deadline:
        return Deadline(min(self.left(), seconds), self._clock)

    def check(self) -> None:
        if self.left() < 0:
            raise OutOfTimeError


@attrs.frozen
class Interval:
    """Milliseconds of a piece of work: on the clock, of all threads, and between CUDA events."""

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


class TimedPolicy(CachePolicy):
    """A policy that measures how long its decisions take, on a GPU without waiting.

    It covers scoring and choosing, and the waits that choosing causes. It does not cover the check
    of the parts' answers, which is one for all layers if the forward can wait for it, nor storing
    the chosen keys and values.
    """

    _on_cuda: bool
    _spans: list[tuple[Any, Any]]

    def __init__(self, policy: CachePolicy, device: torch.device) -> None:
        parts = policy.scorer, policy.selector, policy.propagation
        super().__init__(*parts, rereading=policy.rereading, gapless=policy.gapless)
        object.__setattr__(self, "_on_cuda", device.type == "cuda")
        object.__setattr__(self, "_spans", [])

    def decide(self, context: LayerContext, **how: Any) -> Decision:
        return self._timed(lambda: super(TimedPolicy, self).decide(context, **how))

    def decide_layers(self, layers: Sequence[DeferredLayer]) -> list[Tensor]:
        return self._timed(lambda: super(TimedPolicy, self).decide_layers(layers))

    def decide_restart(self, *given: Any) -> Tensor | None:
        return self._timed(lambda: super(TimedPolicy, self).decide_restart(*given))

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


# A loop of forwards.


@attrs.frozen
class Turn:
    """The times and memory of one prompt and its answer: one time for each token after the first.

    ``held_bytes`` are those of keys and values after prefill. ``memory`` on a GPU: the bytes before
    the prompt, which are the weights, and the most while it was read and while tokens were decoded.
    ``masks``: layers that got an attention mask, which rules out flash attention, while the prompt
    was read and summed over the decoded tokens; None if they were not counted. A layer that is run
    for some of its tokens makes its own mask, which is not counted.
    """

    prefill: Interval
    decode: tuple[Interval, ...]
    held_bytes: int
    memory: tuple[int, int, int] | None = None
    masks: tuple[int, int] | None = None


def take_turn(
    model: PreTrainedModel,
    prompt: Tensor,
    policy: CachePolicy | None,
    new_tokens: int,
    *,
    deadline: Deadline | None = None,
    chunk: int | None = None,
    count_masks: bool = False,
) -> Turn:
    """Read a prompt without padding and decode greedily in a loop; return times and memory.

    The prompt, ``[batch, context]``, is read in forwards of ``chunk`` tokens, or in one. Without a
    policy the cache is Transformers' own `DynamicCache`. At the deadline decoding ends early;
    during prefill `OutOfTimeError` is raised.
    """
    cache: Any = DynamicCache(config=model.config) if policy is None else PolicyCache(policy)
    device, masks = model.device, ([], []) if count_masks else (None, None)
    with nullcontext() if policy is None else cache.attached(model), torch.inference_mode():
        before = restart_peak(device)
        with before_layers(model, deadline, masks[0]):
            token, prefill = timed(device, partial(_read, model, prompt, cache, chunk))
        most = peak(device)
        if isinstance(cache, PolicyCache):
            held = cache.report().total.held_bytes
        else:
            held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        restart_peak(device)
        steps: list[Interval] = []
        with before_layers(model, None, masks[1]):
            while len(steps) < new_tokens - 1 and (deadline is None or deadline.left() > 0):
                token, step = timed(device, partial(_next_token, model, token, cache))
                steps.append(step)
        memory = (before, most, peak(device)) if device.type == "cuda" else None
    counted = (sum(masks[0]), sum(masks[1])) if masks[0] is not None else None
    return Turn(prefill, tuple(steps), held, memory, counted)


def _read(model: PreTrainedModel, prompt: Tensor, cache: Any, chunk: int | None) -> Tensor:
    if chunk is None:
        return _next_token(model, prompt, cache)
    if isinstance(cache, PolicyCache):
        cache.start_turn(prompt_len=prompt.shape[1])
    *earlier, last = prompt.split(chunk, dim=1)
    for each in earlier:
        model(each, cache=cache, use_cache=True, logits_to_keep=1)
    return _next_token(model, last, cache)


def _next_token(model: PreTrainedModel, input_ids: Tensor, cache: Any) -> Tensor:
    output = model(input_ids, cache=cache, use_cache=True, logits_to_keep=1)
    return torch.as_tensor(output.logits[:, -1:].argmax(dim=-1))


def restart_peak(device: torch.device) -> int:
    """Reset the peak memory of the GPU; return the bytes allocated now."""
    if device.type != "cuda":
        return 0
    gc.collect()  # an earlier turn's cache in a reference cycle would count for this turn
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device: torch.device) -> int:
    """Return the peak bytes allocated since `restart_peak`; 0 without a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


@contextmanager
def before_layers(
    model: PreTrainedModel, deadline: Deadline | None, masks: list[bool] | None = None
) -> Iterator[None]:
    """Check a deadline before every decoder layer, and note whether its attention has a mask."""

    def note(module: object, args: object, kwargs: dict[str, Any]) -> None:
        if masks is not None:
            masks.append(kwargs.get("attention_mask") is not None)

    layers: Any = model.get_decoder().layers
    handles = []
    for layer in layers:
        if deadline is not None:
            handles.append(layer.register_forward_pre_hook(lambda *_: deadline.check()))
        if masks is not None:
            handles.append(layer.self_attn.register_forward_pre_hook(note, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# `generate`.


class TokenTimes:
    """A streamer of `generate` that records when it began, and when every token was done."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.seconds: list[float] = []
        self._clock = clock or time.perf_counter

    def put(self, value: Tensor) -> None:
        self.seconds.append(self._clock())

    def end(self) -> None:
        """Do nothing: `generate` calls this after the last token."""

    def steps(self, first: int = 0) -> list[float]:
        """Return the seconds between readings from reading ``first`` on: the prefill's first."""
        return [after - before for before, after in itertools.pairwise(self.seconds[first:])]


class _TokenClock(TokenTimes):
    """Also waits for the device, keeps the tokens, and stops at a deadline."""

    def __init__(
        self, device: torch.device, deadline: Deadline | None, prefill_over: Callable[[], None]
    ) -> None:
        super().__init__()
        self.tokens: list[Tensor] = []
        self._device, self._deadline, self._prefill_over = device, deadline, prefill_over

    def put(self, value: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        super().put(value)
        if len(self.seconds) > 1:
            self.tokens.append(value)
        if len(self.seconds) == 2:
            self._prefill_over()
        if self._deadline is not None:
            self._deadline.check()


@attrs.frozen
class Answer:
    """Tokens ``[batch, tokens]``, times and peak memory of one call of `generate`.

    The prefill's time is that from the start to the first token; without a GPU there is no peak.
    """

    tokens: Tensor
    prefill_ms: float
    decode_ms: tuple[float, ...]
    peak_bytes: int | None


def compile_config(device: torch.device) -> CompileConfig | None:
    """Return what `generate` needs to compile: None on a GPU, where it does so by itself.

    Elsewhere it is made to, with the backend that runs graphs unchanged: a check, without gain.
    """
    if device.type == "cuda":
        return None
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    return config


def compilations() -> tuple[int, int]:
    """Return the graphs that torch compiled in this process, and how often without CUDA graphs."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Run the block with an empty compiler cache, and empty it again afterwards.

    If code compiled for one length were kept, torch would compile the next length for all lengths,
    which decodes slower. After a few more lengths, torch would stop compiling.
    """
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def generate_timed(
    model: PreTrainedModel,
    prompt: Tensor,
    policy: CachePolicy | None,
    new_tokens: int,
    *,
    room: int,
    buffers: str = COMPILED,
    deadline: Deadline | None = None,
) -> Answer:
    """Read a prompt and decode greedily by `generate`, as `take_turn` does in a loop.

    Without a policy the cache is a `DynamicCache` if buffers grow, else a `StaticCache`. Fixed
    buffers have ``room`` for so many new tokens; the compiled code depends on that.
    """
    config = compile_config(model.device) if buffers == COMPILED else None
    how: dict[str, Any] = {} if config is None else {"compile_config": config}
    if policy is not None:
        cache: Any = PolicyCache(policy, max_new_tokens=None if buffers == GROWING else room)
    elif buffers == GROWING:
        cache = DynamicCache(config=model.config)
    else:
        cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + room)
    restart_peak(model.device)
    prefill = ExitStack()
    clock = _TokenClock(model.device, deadline, prefill.close)
    with prefill, suppress(OutOfTimeError):
        # The hooks are removed before compiling, since they would change what is compiled.
        prefill.enter_context(before_layers(model, deadline))
        model.generate(
            prompt,
            cache=cache,
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=clock,
            disable_compile=buffers != COMPILED,
            **how,
        )
    if not clock.tokens:
        raise OutOfTimeError
    first, *others = (1e3 * step for step in clock.steps())
    peak_bytes = peak(model.device) if model.device.type == "cuda" else None
    return Answer(torch.stack(clock.tokens, dim=1), first, tuple(others), peak_bytes)
