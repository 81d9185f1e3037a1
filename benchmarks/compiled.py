"""Time an answer of `model.generate`, token by token, with each kind of buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, PreTrainedModel, StaticCache

from benchmarks.clocks import Deadline, OutOfTimeError, TokenTimes
from benchmarks.turns import before_layers, peak, prefill_hook, restart_peak
from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache

# How a cache holds what is decoded.
GROWING, FIXED, COMPILED = "growing", "fixed", "compiled"


@attrs.frozen
class Answer:
    """The tokens, times and peak memory of one call of `generate`.

    Args:
        tokens: The generated tokens ``[batch, tokens]``, on the processor; fewer than asked for if
            time ended.
        prefill_ms: From the start of the prompt to the first token.
        decode_ms: Milliseconds of each further token, with all that `generate` does for it.
        peak_bytes: The most that torch had allocated on the GPU; None without one.
    """

    tokens: Tensor
    prefill_ms: float
    decode_ms: tuple[float, ...]
    peak_bytes: int | None


@attrs.frozen
class Compilations:
    """A snapshot of torch's counters of compilations.

    Args:
        graphs: Number of compiled graphs.
        without_cuda_graphs: Number of times that torch skipped CUDA graphs that were meant to be
            used: Python then starts the kernels one by one.
    """

    graphs: int
    without_cuda_graphs: int

    @staticmethod
    def so_far() -> Compilations:
        """Return the counters of this process so far."""
        counters = torch._dynamo.utils.counters
        skips = counters["inductor"]["cudagraph_skips"]
        return Compilations(counters["stats"]["unique_graphs"], skips)

    def since(self, before: Compilations) -> Compilations:
        """Return the compilations since an earlier snapshot."""
        return Compilations(
            self.graphs - before.graphs, self.without_cuda_graphs - before.without_cuda_graphs
        )


class TokenClock(TokenTimes):
    """A `TokenTimes` that waits for the device before each time, and stops at a deadline.

    Args:
        device: Waited for before the clock is read.
        deadline: Checked after every reading; `generate` ends when it is over.
        prefill_over: Called once the first token has come.

    Attributes:
        tokens: ``[batch]`` for each token; one fewer than there are readings.
    """

    def __init__(
        self, device: torch.device, deadline: Deadline | None, prefill_over: Callable[[], None]
    ) -> None:
        super().__init__()
        self.tokens: list[Tensor] = []
        self._device = device
        self._deadline = deadline
        self._prefill_over = prefill_over

    def put(self, value: Tensor) -> None:
        """Record the time when the prompt, or one token of each row, was done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        super().put(value)
        if len(self.seconds) > 1:
            self.tokens.append(value)
        if len(self.seconds) == 2:
            self._prefill_over()
        if self._deadline is not None:
            self._deadline.check()


def compile_config(device: torch.device) -> CompileConfig | None:
    """Return the compile settings to pass to `generate`.

    This is None on a GPU, where `generate` compiles by itself. Elsewhere it would not compile, so
    it is made to, with the backend that runs graphs unchanged: a check that it works, without gain.

    Args:
        device: The model's.
    """
    if device.type == "cuda":
        return None
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    return config


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
    """Read a prompt and decode greedily by `generate`.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode, that never ends a text.
        prompt: Token ids ``[batch, context]`` on the model's device, without padding.
        policy: None for Transformers' own `StaticCache`; for `DynamicCache` if buffers grow.
        new_tokens: Tokens to generate, at least 1; the prefill gives the first.
        room: New tokens that buffers of fixed size have memory for, at least ``new_tokens``. The
            compiled code depends on this, not on ``new_tokens``.
        buffers: ``growing``, ``fixed``, or ``compiled``: of fixed size, and decoding is compiled.
        deadline: Checked before every layer of the prefill and after every token; decoding then
            ends early.

    Raises:
        OutOfTimeError: The deadline passed during prefill.
    """
    config = compile_config(model.device) if buffers == COMPILED else None
    how: dict[str, Any] = {} if config is None else {"compile_config": config}
    cache = _cache(model, prompt.shape[1], policy, None if buffers == GROWING else room)
    restart_peak(model.device)
    prefill = ExitStack()
    clock = TokenClock(model.device, deadline, prefill.close)
    with prefill, suppress(OutOfTimeError):
        # The hooks are removed before compiling, since they would change what is compiled.
        prefill.enter_context(before_layers(model, prefill_hook(deadline, None)))
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
    first, *others = clock.steps_ms()
    peak_bytes = peak(model.device) if model.device.type == "cuda" else None
    return Answer(torch.stack(clock.tokens, dim=1), first, tuple(others), peak_bytes)


def _cache(
    model: PreTrainedModel, context: int, policy: CachePolicy | None, room: int | None
) -> PolicyCache | DynamicCache | StaticCache:
    if policy is not None:
        return PolicyCache(policy, max_new_tokens=room)
    if room is None:
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=context + room)
