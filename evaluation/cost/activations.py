"""Measure the memory of a forward beside the cache, by running it on torch's `meta` device.

As in `tracing`, the model is built on the `meta` device. It reads as many tokens as are asked for,
while the bytes of its tensors are followed: no family's formulas are needed, and masks, rotary
embeddings and what a model's own code keeps alive too long are all counted.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
)

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation.cost.chunk_attention import ChunkAttention
from kvpolicy.evaluation.cost.deciding import deciding_bytes
from kvpolicy.evaluation.cost.live_bytes import LiveBytes
from kvpolicy.evaluation.cost.model_shape import LayerShape
from kvpolicy.evaluation.cost.released import Weights, released_weights
from kvpolicy.evaluation.cost.tracing import quiet
from kvpolicy.evaluation.defaults import ATTENTION_NAMES
from kvpolicy.integrations.transformers.model.finding import find_decoder, layers_within
from kvpolicy.integrations.transformers.model.routing import eager_function
from kvpolicy.integrations.transformers.surface import (
    CACHE,
    eager_mask,
    flash_attention_mask,
    sdpa_attention_forward,
    sdpa_mask,
)
from kvpolicy.policy import CachePolicy

# The code of layers with states may loop over the tokens, so it is run at these two lengths. The
# memory of a longer prompt is extrapolated on a straight line.
SHORT, LONGER = 512, 1024
NAME = "kvpolicy_memory"


@attrs.frozen
class LayerActivations:
    """Bytes in use at three moments of one layer's forward pass, cache excluded.

    Args:
        attending: The most before its attention has returned; keys and values are among them.
        observing: When it has.
        after: The most from then to the layer's end; where nothing attends, in the whole layer.
    """

    attending: int
    observing: int
    after: int


@attrs.frozen
class Activations:
    """Bytes in use during a forward pass, cache excluded: in each layer, and after the last one.

    Args:
        layers: In each layer.
        head: The most behind the last of them.
    """

    layers: tuple[LayerActivations, ...]
    head: int


class ModelMemory:
    """A model on the `meta` device, to measure its weights' and forward passes' memory.

    Args:
        config: Its configuration.
        name: What to call it in messages.
        dtype: Of its weights, where it does not say otherwise.
        attention: How it attends: ``"sdpa"``, by kernels that hold no scores but take masks
            as tensors of a number for each query and key; ``"flash"``, by one that takes none; or
            ``"eager"``, which holds the scores. None: ``"sdpa"`` where the family has it, else
            ``"eager"``, as Transformers does.

    Attributes:
        attention: As above, never None.
        dtype: As above.

    Raises:
        UnsupportedModelError: Transformers cannot make it so.
    """

    def __init__(
        self,
        config: Any,
        name: str,
        dtype: torch.dtype = torch.bfloat16,
        attention: str | None = None,
    ) -> None:
        self.name, self.dtype, self._config = name, dtype, config
        with self._refusing():
            self._model, self.attention = _built(copy.deepcopy(config), dtype, attention)
            self._text = config.get_text_config(decoder=True)
            self._layers = layers_within(find_decoder(self._model))
        tensors = [*self._model.parameters(), *self._model.buffers()]
        self._tensors = list({id(each): each for each in tensors}.values())
        self._read: dict[tuple[int, int, ChunkAttention | None], Activations] = {}
        self._decided: dict[tuple[Any, ...], int] = {}

    @cached_property
    def weights(self) -> Weights:
        """The bytes of the model's parameters and buffers; shared tensors count once.

        Those that its configuration says are quantised count as they were released.

        Raises:
            ValueError: They are quantised in a way that is not known here.
        """
        return released_weights(self._model, self._config, self.name)

    def forward(
        self,
        new_len: int,
        held_len: int = 0,
        *,
        loops: bool = False,
        chunk: ChunkAttention | None = None,
    ) -> Activations:
        """Return the bytes in use during a forward pass of the given length, cache excluded.

        Args:
            new_len: Tokens that it reads, at least 1.
            held_len: Tokens that the cache holds before.
            loops: Whether layers may loop over tokens; many are then not read one by one.
            chunk: How it attends where it reads a chunk of a prompt; None where the model's own
                mask is one of all that the cache holds.

        Raises:
            UnsupportedModelError: The model does not run so.
        """
        if loops and new_len > LONGER:
            first, second = (self.forward(n, held_len, chunk=chunk) for n in (SHORT, LONGER))
            return _extended(first, second, (new_len - SHORT) / (LONGER - SHORT))
        key = new_len, held_len, chunk
        if key not in self._read:
            with self._refusing():
                self._read[key] = self._run(*key)
        return self._read[key]

    def deciding(
        self,
        policy: CachePolicy,
        layer: LayerShape,
        place: tuple[int, int],
        key_len: int,
        device: str,
        *,
        query_len: int | None = None,
    ) -> int:
        """Return the peak bytes that a policy needs to choose the tokens that a layer keeps."""
        policy = attrs.evolve(policy, decoding=None)  # irrelevant here, so both cases give the same
        acts = place[0] in policy.propagation.acting_layers(place[1])
        key = str(policy), layer, acts, key_len, device, query_len
        if key not in self._decided:
            self._decided[key] = deciding_bytes(
                policy, layer, place, key_len, dtype=self.dtype, device=device, query_len=query_len
            )
        return self._decided[key]

    def _run(self, new_len: int, held_len: int, chunk: ChunkAttention | None) -> Activations:
        cache = _Passing(self._text, held_len, in_chunks=chunk is not None)
        live = LiveBytes(self._tensors)
        watch = _Watch(live, len(self._layers), chunk)
        handles = []
        for index, layer in enumerate(self._layers):
            handles.append(layer.register_forward_pre_hook(watch.enter(index)))
            handles.append(layer.register_forward_hook(watch.leave))
        token = _watching.set(watch)
        try:
            with torch.no_grad(), quiet(), live:
                ids = torch.ones(1, new_len, dtype=torch.long, device="meta")
                self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        finally:
            _watching.reset(token)
            for handle in handles:
                handle.remove()
        return Activations(tuple(map(_Seen.found, watch.layers)), live.peak)

    def _refusing(self) -> _Refusing:
        return _Refusing(self.name)


@attrs.frozen
class _Refusing:
    """Context manager that turns errors in a model's own code into `UnsupportedModelError`."""

    name: str

    def __enter__(self) -> None:
        """Enter the ``with`` statement; nothing needs to be set up."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            reason = f"{type(error).__name__}: {textwrap.shorten(str(error), 160)}"
            raise UnsupportedModelError(
                f"{self.name} must be a decoder that runs without weights, so that its memory can "
                f"be measured, but its run ended in {reason}"
            ) from error


def _built(config: Any, dtype: torch.dtype, attention: str | None) -> tuple[nn.Module, str]:
    """Build a model on `meta` from its configuration; return it and its attention kernel's name."""
    text = config.get_text_config(decoder=True)
    makers: list[tuple[Any, Any]] = [
        (AutoModelForCausalLM, text),
        (AutoModelForImageTextToText, config),
        (AutoModel, text),
    ]
    for maker, made_of in makers:
        if type(made_of) in maker._model_mapping:
            kind = maker._model_mapping[type(made_of)]
            chosen = attention or ("sdpa" if kind._supports_sdpa else "eager")
            # Transformers decides by an implementation's name: it must not contain flash or sdpa.
            name = f"{NAME}_{list(ATTENTIONS).index(chosen)}"
            AttentionInterface.register(name, _watched(chosen))
            AttentionMaskInterface.register(name, ATTENTIONS[chosen])
            with torch.device("meta"), quiet():
                made: Any = maker.from_config(made_of, dtype=dtype, attn_implementation=name)
                model: nn.Module = made.eval()
            return model, chosen
    raise ValueError("Transformers has no decoder class for it")


class _Passing(DynamicCache):  # type: ignore[misc]
    """A fake cache that returns tensors as long as a filled cache's, without storing anything.

    These count as the cache's own memory and are not counted here. If the cache holds nothing, the
    forward's own keys and values are returned, which count for the forward.
    """

    def __init__(self, config: Any, held_len: int, *, in_chunks: bool) -> None:
        super().__init__(config=config)
        self._held_len = held_len
        self._in_chunks = in_chunks

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self._held_len:
            return key_states, value_states
        return self._longer(key_states), self._longer(value_states)

    def _longer(self, tensor: Tensor) -> Tensor:
        batch, heads, count, dim = tensor.shape
        shape = batch, heads, self._held_len + count, dim
        with _watching.get().live.paused():
            return tensor.new_empty(shape)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._held_len

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self._in_chunks:  # as `PolicyCache` tells a decoder
            return query_length, self._held_len
        return self._held_len + query_length, 0


@attrs.define(eq=False)
class _Seen:
    """The peak bytes recorded so far in one layer of a forward pass."""

    attending: int = 0
    observing: int = 0
    after: int = 0

    def found(self) -> LayerActivations:
        return LayerActivations(self.attending, self.observing, self.after)


class _Watch:
    """Records the bytes in use in each layer while a forward pass runs."""

    def __init__(self, live: LiveBytes, count: int, chunk: ChunkAttention | None) -> None:
        self.live = live
        self.chunk = chunk
        self.layers = [_Seen() for _ in range(count)]
        self.current: _Seen | None = None

    def enter(self, index: int) -> Callable[..., None]:
        def entered(*_: Any) -> None:
            self.live.restart()
            self.current = self.layers[index]

        return entered

    def leave(self, *_: Any) -> None:
        assert self.current is not None
        self.current.after = max(self.current.after, self.live.restart())
        self.current = None

    def attended(self) -> None:
        if self.current is not None:
            self.current.attending = max(self.current.attending, self.live.restart())
            self.current.observing = max(self.current.observing, self.live.live)


_watching: ContextVar[_Watch] = ContextVar("watching")


def _watched(attention: str) -> Callable[..., tuple[Tensor, None]]:
    """Make an attention function that returns empty outputs and records the bytes in use."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        watch = _watching.get()
        if watch.chunk is not None and watch.current is not None and key.shape[2] > query.shape[2]:
            tensors, index = (query, key, value), watch.layers.index(watch.current)
            output = watch.chunk.attend(attention, KERNELS, index, module, tensors, **kwargs)
            del tensors
        else:
            output = KERNELS[attention](module, query, key, value, *others, **kwargs)
        del query, key, value
        watch.attended()
        return output, None

    return attend


def _sdpa(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    with _Kernels():
        output: Tensor = sdpa_attention_forward(module, *args, **kwargs)[0]
    return output


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    output: Tensor = eager_function(module)(module, *args, **kwargs)[0]
    return output


def _flash(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> Tensor:
    return _kernel_output(query, value).transpose(1, 2)


class _Kernels(TorchFunctionMode):
    """A torch mode that replaces scaled_dot_product_attention, which `meta` cannot run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, _, value, *others = args
        mask = others[0] if others else kwargs.get("attn_mask")
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            mask = mask.to(query.dtype)  # as before any kernel
        return _kernel_output(query, value)


def _kernel_output(query: Tensor, value: Tensor) -> Tensor:
    """Return an attention kernel's empty output tensor, without computing it."""
    batch, heads, count, _ = query.shape
    sums = query.new_empty(batch, heads, count, dtype=torch.float32)
    output = query.new_empty(batch, count, heads, value.shape[-1]).transpose(1, 2)
    del sums
    return output


# By name: how masks are made, and the attention function.
ATTENTIONS: dict[str, Any] = dict(
    zip(ATTENTION_NAMES, (sdpa_mask, flash_attention_mask, eager_mask), strict=True)
)
KERNELS: dict[str, Callable[..., Tensor]] = {"sdpa": _sdpa, "flash": _flash, "eager": _eager}


def _extended(first: Activations, second: Activations, times: float) -> Activations:
    """Extrapolate memory measurements of two prompt lengths linearly to a longer prompt."""

    def on_line(low: int, high: int) -> int:
        return round(low + (high - low) * times)

    pairs = zip(first.layers, second.layers, strict=True)
    layers = tuple(
        LayerActivations(*map(on_line, attrs.astuple(low), attrs.astuple(high)))
        for low, high in pairs
    )
    return Activations(layers, on_line(first.head, second.head))
