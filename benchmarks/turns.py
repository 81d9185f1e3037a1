"""Measure one prompt and its answer, on a processor or on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.clocks import Deadline, Interval, timed
from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache


@attrs.frozen
class GPUMemory:
    """The bytes that torch has allocated on the GPU before and during a measurement.

    Args:
        before: Bytes before the prompt, which are the weights.
        prefill_peak: The most bytes while the prompt was read.
        decode_peak: The most bytes while tokens were decoded.
    """

    before: int
    prefill_peak: int
    decode_peak: int


@attrs.frozen
class Turn:
    """The times and memory of one prompt and its answer.

    Args:
        prefill: Time from the prompt to the first token.
        decode: One time for each further token.
        held_bytes: Bytes of the cache's keys and values after prefill.
        memory: None without a GPU.
    """

    prefill: Interval
    decode: tuple[Interval, ...]
    held_bytes: int
    memory: GPUMemory | None


class MaskWatch:
    """Counts the layers that receive an attention mask, which rules out flash attention.

    Attributes:
        prefill: Layers that got a mask while the prompt was read; both passes of a restart count.
            A layer that is run for some of its tokens makes its own mask, which is not counted.
        decode: Layers that got a mask, summed over all decoded tokens.
    """

    def __init__(self) -> None:
        self.prefill = 0
        self.decode = 0


def take_turn(
    model: PreTrainedModel,
    prompt: Tensor,
    policy: CachePolicy | None,
    new_tokens: int,
    *,
    deadline: Deadline | None = None,
    masks: MaskWatch | None = None,
    chunk: int | None = None,
) -> Turn:
    """Read a prompt and decode greedily in a loop; return times and memory.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        prompt: Token ids ``[batch, context]`` on the model's device, without padding.
        policy: None for Transformers' own `DynamicCache`.
        new_tokens: Tokens to generate, at least 1; the prefill gives the first.
        deadline: Checked before every layer of the prefill and every token; decoding ends early.
        masks: Counts the masks, if given.
        chunk: Tokens of a forward that reads a part of the prompt; None to read it in one.

    Raises:
        OutOfTimeError: The deadline passed during prefill.
    """
    cache: PolicyCache | DynamicCache
    cache = DynamicCache(config=model.config) if policy is None else PolicyCache(policy)
    attached = cache.attached(model) if isinstance(cache, PolicyCache) else nullcontext()
    device = model.device
    with attached, torch.inference_mode():
        before = restart_peak(device)
        with before_layers(model, prefill_hook(deadline, masks)):
            token, prefill = timed(device, partial(_read, model, prompt, cache, chunk))
        prefill_peak, held = peak(device), held_bytes(cache)
        restart_peak(device)
        with before_layers(model, _decode_hook(masks)):
            decode = _decode(model, token, cache, new_tokens - 1, deadline)
        memory = None
        if device.type == "cuda":
            memory = GPUMemory(before, prefill_peak, peak(device))
    return Turn(prefill, tuple(decode), held, memory)


def _read(model: PreTrainedModel, prompt: Tensor, cache: Any, chunk: int | None) -> Tensor:
    if chunk is None:
        return _next_token(model, prompt, cache)
    if isinstance(cache, PolicyCache):
        cache.start_turn(prompt_len=prompt.shape[1])
    *earlier, last = prompt.split(chunk, dim=1)
    for each in earlier:
        model(each, cache=cache, use_cache=True, logits_to_keep=1)
    return _next_token(model, last, cache)


def _decode(
    model: PreTrainedModel, token: Tensor, cache: Any, count: int, deadline: Deadline | None
) -> list[Interval]:
    steps: list[Interval] = []
    while len(steps) < count and (deadline is None or deadline.left() > 0):
        token, step = timed(model.device, partial(_next_token, model, token, cache))
        steps.append(step)
    return steps


def _next_token(model: PreTrainedModel, input_ids: Tensor, cache: Any) -> Tensor:
    output = model(input_ids, cache=cache, use_cache=True, logits_to_keep=1)
    return torch.as_tensor(output.logits[:, -1:].argmax(dim=-1))


def held_bytes(cache: PolicyCache | DynamicCache) -> int:
    """Return the bytes of the keys and values that a cache holds."""
    if isinstance(cache, PolicyCache):
        return cache.report().total.held_bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


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


Hook = Callable[[dict[str, Any]], None]


def prefill_hook(deadline: Deadline | None, masks: MaskWatch | None) -> Hook | None:
    """Return the hook to call before each layer of a prompt; None if none is needed."""
    if deadline is None and masks is None:
        return None

    def before_layer(kwargs: dict[str, Any]) -> None:
        if deadline is not None:
            deadline.check()
        if masks is not None:
            masks.prefill += kwargs.get("attention_mask") is not None

    return before_layer


def _decode_hook(masks: MaskWatch | None) -> Hook | None:
    if masks is None:
        return None

    def before_layer(kwargs: dict[str, Any]) -> None:
        masks.decode += kwargs.get("attention_mask") is not None

    return before_layer


@contextmanager
def before_layers(model: PreTrainedModel, hook: Hook | None) -> Iterator[None]:
    """Call a function before every decoder layer, after the hooks of an attached cache."""
    if hook is None:
        yield
        return
    layers: Any = model.get_decoder().layers
    handles = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: hook(kwargs), with_kwargs=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
