"""Attaching a cache to a model: hooks that exist only while it lasts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.static_decoding import BeforeLayer, before_decoder
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.model.routing import route, unroute, users_of

if TYPE_CHECKING:
    from kvpolicy.integrations.transformers.cache import PolicyCache


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
        if not _carries(self.cache, args, kwargs):
            return None
        # Some models give all but the input by name, some not.
        others = dict(kwargs or {}) if len(args) < 2 else _by_name(module, args, kwargs)
        name = list(_signature(type(module).forward).parameters)[1]  # after self
        hidden: Tensor = args[0] if args else others[name]
        others.pop(name, None)
        hidden, others = self.cache.forward.enter_layer(self.index, module, hidden, others)
        return (hidden,), others

    def after(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Cut the layer's output to the tokens that go on."""
        if len(rest) < 2 or not _carries(self.cache, args, rest[0]):
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
        self._outer: list[nn.Module] = [parts.model]  # whose calls are watched as well
        self._handles: list[RemovableHandle] = []
        self._routed: list[nn.Module] = []

    def attach(self) -> None:
        """Register the hooks; if that fails, none is left."""
        self.detach()
        try:
            for attention in self.parts.attentions:
                route(attention)
                self._routed.append(attention)
            decoder = self.parts.decoder
            self._handles = [
                *(handle for model in self._outer for handle in self._on_model(model)),
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

    @property
    def alone(self) -> bool:
        """Whether no other cache is attached to the model, whose hooks would be compiled too."""
        return all(users_of(attention) == 1 for attention in self.parts.attentions)

    def decode(self) -> None:
        """Register the hooks of a decoding that may be compiled, in the place of the others."""
        self.detach()
        decoder = self.parts.decoder
        self._handles = [decoder.register_forward_pre_hook(before_decoder, with_kwargs=True)]
        for index, layer in enumerate(self.parts.layers):
            hook = BeforeLayer.of(index, layer)
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))

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
        if model in self._outer:
            yield
            return
        self._outer.append(model)
        handles = self._on_model(model) if self.cache.static is None else []
        self._handles += handles
        try:
            yield
        finally:
            self._outer.remove(model)
            for handle in handles:
                handle.remove()
            if self.cache.static is None and not set(handles) & set(self._handles):
                self.attach()  # hooks were registered anew in between, those on this model too

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
        self.cache.begin_call(None if arguments.get("labels") is not None else last)
        if not self.cache.may_drop:
            return
        whole = {
            "labels": arguments.get("labels") is not None,
            "a tensor of logits_to_keep": isinstance(keep, Tensor),
            "output_router_logits": bool(arguments.get("output_router_logits")),
        }
        if any(whole.values()):
            raise ValueError(
                f"{' and '.join(name for name, given in whole.items() if given)} must not be "
                f"given for a prompt of which {self.cache.policy} drops tokens, since a dropped "
                "token has no logits; the logits returned are those of the last tokens that went on"
            )

    def after_model(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """Conclude the call, or take it back, which may have failed behind the decoder."""
        if len(rest) == 2 and self._carries_cache(args, rest[0]):
            self.cache.end_call(failed=rest[1] is None)

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
        return _carries(self.cache, args, kwargs)


def _carries(cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    return kwargs is not None and any(each is cache for each in (*args, *kwargs.values()))


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
