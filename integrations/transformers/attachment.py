"""Attaching a cache to a model: hooks that exist only while it lasts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.masks import IMPLEMENTATIONS
from kvpolicy.integrations.transformers.routing import route, unroute

if TYPE_CHECKING:
    from kvpolicy.integrations.transformers.cache import PolicyCache

# Families held against the reference; more follow as they are.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class ModelParts:
    """The modules of a model that a cache attaches to.

    Args:
        model: A decoder-only language model of Transformers, with or without its head.

    Raises:
        TypeError: ``model`` is not a torch module.
        UnsupportedModelError: It has no structure that a policy can be applied to; says why.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.model = model
        self.decoder = _find_decoder(model)
        config: Any = self.decoder.config
        layers: Any = self.decoder.layers
        self.config = config
        self.layers: list[nn.Module] = list(layers)
        self.attentions = [_find_attention(layer, i) for i, layer in enumerate(self.layers)]
        _ = self.implementation

    @property
    def implementation(self) -> str:
        """The attention implementation, which may be changed between two forwards.

        Raises:
            UnsupportedModelError: It is one whose masks are not known.
        """
        name = str(self.config._attn_implementation)
        if name not in IMPLEMENTATIONS:
            raise UnsupportedModelError(
                f"attn_implementation of the model must be one of {', '.join(IMPLEMENTATIONS)}, "
                f"got {name!r}; load it with attn_implementation='sdpa'"
            )
        return name

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def device_of(self, index: int) -> torch.device:
        """The device of a layer's parameters."""
        return next(self.layers[index].parameters()).device

    def check_context(self, context_len: int) -> None:
        """Check that a context fits the model's sliding window, if it has one.

        Raises:
            UnsupportedModelError: It does not.
        """
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        if window is None or (kinds is not None and "sliding_attention" not in kinds):
            return
        if context_len > window:
            raise UnsupportedModelError(
                f"context must fit the model's sliding_window of {window} tokens, got "
                f"{context_len}; policies over sliding windows are not supported yet"
            )


def _find_decoder(model: Any) -> nn.Module:
    config = getattr(model, "config", None)
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"model must be decoder-only, got the encoder-decoder {name}")
    if isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None:
        raise UnsupportedModelError(
            f"model must not be compiled, since hooks do not reach a compiled graph, got {name}; "
            "pass the model before torch.compile"
        )
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = getattr(decoder, "layers", None)
    if config is None or not isinstance(layers, nn.ModuleList) or not len(layers):
        raise UnsupportedModelError(
            f"model must have get_decoder() with a list of decoder layers, got {name}"
        )
    if decoder.config.model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"model_type must be one of {', '.join(MODEL_TYPES)}, got "
            f"{decoder.config.model_type!r} ({name}); other families are not supported yet"
        )
    assert isinstance(decoder, nn.Module)
    return decoder


def _find_attention(layer: nn.Module, index: int) -> nn.Module:
    attention = getattr(layer, "self_attn", None)
    if not isinstance(attention, nn.Module) or getattr(attention, "layer_idx", None) != index:
        raise UnsupportedModelError(
            f"every decoder layer must have a self_attn with its own layer_idx, got "
            f"{type(layer).__name__} at {index} without"
        )
    return attention


class _Hooks:
    """Hooks whose copies, on a copied module, do nothing."""

    cache: PolicyCache

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hooks:
        idle = type(self).__new__(type(self))
        no_cache: Any = object()  # no call carries it
        idle.cache = no_cache
        return idle


# Torch looks up whether a hook takes keyword arguments when it calls it. Where another thread has
# detached its cache from the model in between, the hook is called without; it was that thread's,
# whose own forwards have ended, so there is nothing to do.


class LayerHooks(_Hooks):
    """What one decoder layer does for a cache.

    Args:
        cache: The cache.
        index: The layer's.
    """

    def __init__(self, cache: PolicyCache, index: int) -> None:
        self.cache = cache
        self.index = index

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give the layer the arguments of the tokens that reach it."""
        if kwargs is None or kwargs.get("past_key_values") is not self.cache:
            return None
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        hidden, others = self.cache.forward.enter_layer(self.index, module, hidden, others)
        return (hidden, *args[1:]), others

    def after(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Cut the layer's output to the tokens that go on."""
        if len(rest) < 2 or rest[0].get("past_key_values") is not self.cache:
            return None
        if self.cache.forward.waits_for_queries():
            raise UnsupportedModelError(
                f"model must hand the keys of the cache to an attention function as they are, "
                f"but {type(module).__name__} at {self.index} did not; the policy saw no queries"
            )
        return self.cache.forward.leave_layer(self.index, rest[1])


class Attachment(_Hooks):
    """Hooks on a model that act on the calls that carry one cache, and on no others.

    Args:
        cache: The cache.
        parts: The model's modules.
    """

    def __init__(self, cache: PolicyCache, parts: ModelParts) -> None:
        self.cache = cache
        self.parts = parts
        self._handles: list[RemovableHandle] = []
        self._routed: list[nn.Module] = []

    def attach(self) -> None:
        """Register the hooks; if that fails, none is left."""
        try:
            for attention in self.parts.attentions:
                route(attention)
                self._routed.append(attention)
            decoder = self.parts.decoder
            self._handles = [
                *self._on_model(self.parts.model),
                decoder.register_forward_pre_hook(self.before_decoder, with_kwargs=True),
                decoder.register_forward_hook(
                    self.after_decoder, with_kwargs=True, always_call=True
                ),
            ]
            for index, layer in enumerate(self.parts.layers):
                hooks = LayerHooks(self.cache, index)
                self._handles += [
                    layer.register_forward_pre_hook(hooks.before, with_kwargs=True),
                    # First, so that other hooks, such as those that record hidden states, see
                    # what goes on.
                    layer.register_forward_hook(hooks.after, with_kwargs=True, prepend=True),
                ]
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        for attention in self._routed:
            unroute(attention)
        self._handles, self._routed = [], []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the calls of another module around the same decoder as well."""
        if model is self.parts.model:
            yield
            return
        handles = self._on_model(model)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_model(self, model: nn.Module) -> list[RemovableHandle]:
        return [
            model.register_forward_pre_hook(self.before_model, with_kwargs=True),
            model.register_forward_hook(self.after_model, with_kwargs=True, always_call=True),
        ]

    def before_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Refuse what asks for logits of tokens that may be dropped; see which are asked for."""
        if not self._carries_cache(args, kwargs):
            return
        arguments = _by_name(module, args, kwargs)
        keep = arguments.get("logits_to_keep")
        known = "logits_to_keep" in _signature(type(module).forward).parameters
        last = keep if known and isinstance(keep, int) and keep > 0 else None
        self.cache.keep_last = None if arguments.get("labels") is not None else last
        if not self.cache.may_drop:
            return
        if arguments.get("labels") is not None or isinstance(
            arguments.get("logits_to_keep"), Tensor
        ):
            raise ValueError(
                "labels and a tensor of logits_to_keep must not be given for a prompt of which "
                f"{self.cache.policy} drops tokens, since a dropped token has no logits; the "
                "logits returned are those of the last tokens that went on"
            )

    def after_model(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """Forget which logits were asked for."""
        if len(rest) == 2 and self._carries_cache(args, rest[0]):
            self.cache.keep_last = None

    def before_decoder(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Take up a forward that carries the cache."""
        if not self._carries_cache(args, kwargs):
            return None
        return (), self.cache.begin_forward(_by_name(module, args, kwargs))

    def after_decoder(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Conclude a forward, or take it back if it failed and there is no output."""
        if len(rest) < 2 or not self._carries_cache(args, rest[0]):
            return None
        if rest[1] is None:
            self.cache.abandon_forward()
            return None
        return self.cache.finish_forward(rest[1])

    def _carries_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        return kwargs is not None and any(each is self.cache for each in (*args, *kwargs.values()))


def _by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> dict[str, Any]:
    """A call's arguments by name."""
    signature = _signature(type(module).forward)
    arguments = dict(signature.bind_partial(module, *args, **(kwargs or {})).arguments)
    arguments.update(arguments.pop("kwargs", {}))
    arguments.pop("self")
    return arguments


@functools.lru_cache(maxsize=32)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)
