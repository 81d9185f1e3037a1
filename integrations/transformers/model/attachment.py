"""Attaching a cache to a model: hooks that exist only while it lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.model.call_arguments import by_name, signature
from kvpolicy.integrations.transformers.model.observing import observe, unobserve
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.model.routing import route, unroute, users_of
from kvpolicy.policy import CachePolicy

DecoderHook = Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]


class Passage(Protocol):
    """One forward, as the hooks on layers see it."""

    def enter_layer(
        self, index: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """The arguments under which a decoder layer sees only the tokens that reach it."""

    def waits_for_queries(self) -> bool:
        """Whether the layer's attention function is still to come."""

    def leave_layer(self, index: int, output: Any) -> Any:
        """The layer's output for the tokens that go on."""


class Listener(Protocol):
    """Whoever is told of the calls of a model: the cache's `Reader`."""

    @property
    def policy(self) -> CachePolicy:
        """The policy that acts."""

    @property
    def may_drop(self) -> bool:
        """Whether the next forward may drop tokens."""

    @property
    def may_evict(self) -> bool:
        """Whether the policy acts on the next forward, and may keep fewer tokens than there are."""

    @property
    def is_static(self) -> bool:
        """Whether an answer is being decoded into buffers of a fixed size."""

    @property
    def forward(self) -> Passage:
        """The forward under way."""

    def begin_call(self, keep_last: int | None) -> None:
        """Take up a call of the model, which runs the decoder and then a head."""

    def note_call(self, arguments: Mapping[str, Any], kinds: Tensor | None) -> None:
        """Take note of a call of a module around the decoder; ``kinds`` are those of its tokens."""

    def end_call(self, *, failed: bool) -> None:
        """Conclude a call of the model, or undo it."""

    def begin_forward(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Take up a forward of the decoder; returns the arguments to run it with."""

    def finish_forward(self, output: Any) -> Any:
        """Conclude it; returns the decoder's output."""

    def fail_forward(self) -> None:
        """Take it back."""


class _Hooks:
    """Hooks whose copies, on a copied module, do nothing."""

    cache: Cache

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
        listener: Who is told of the calls that carry it.
        index: The layer's.
    """

    def __init__(self, cache: Cache, listener: Listener, index: int) -> None:
        self.cache = cache
        self.listener = listener
        self.index = index

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give the layer the arguments of the tokens that reach it."""
        if not _carries(self.cache, args, kwargs):
            return None
        # Some models give all but the input by name, some not.
        others = dict(kwargs or {}) if len(args) < 2 else by_name(module, args, kwargs)
        name = list(signature(type(module).forward).parameters)[1]  # after self
        hidden: Tensor = args[0] if args else others[name]
        others.pop(name, None)
        hidden, others = self.listener.forward.enter_layer(self.index, module, hidden, others)
        return (hidden,), others

    def after(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Cut the layer's output to the tokens that go on."""
        if len(rest) < 2 or not _carries(self.cache, args, rest[0]):
            return None
        if self.listener.forward.waits_for_queries():
            raise UnsupportedModelError(
                f"model must hand the keys of the cache, or what it makes of each of them, to an "
                f"attention function, but {type(module).__name__} at {self.index} did not; the "
                "policy saw no queries"
            )
        return self.listener.forward.leave_layer(self.index, rest[1])


class Attachment(_Hooks):
    """Hooks on a model that act on the calls that carry one cache, and on no others.

    Args:
        cache: The cache.
        listener: Who is told of the calls that carry it.
        parts: The model's modules.
    """

    def __init__(self, cache: Cache, listener: Listener, parts: ModelParts) -> None:
        self.cache = cache
        self.listener = listener
        self.parts = parts
        self._outer: list[nn.Module] = [parts.model]  # whose calls are watched as well
        self._handles: list[RemovableHandle] = []
        self._routed: list[nn.Module] = []
        self._observed: list[nn.Module] = []

    def attach(self) -> None:
        """Register the hooks; if that fails, none is left."""
        self.detach()
        try:
            for attention in filter(None, self.parts.attentions):
                route(attention)
                self._routed.append(attention)
            decoder = self.parts.decoder
            self._handles = [
                *(handle for model in self._outer for handle in self._on_model(model)),
                *(
                    module.register_forward_pre_hook(self.before_between, with_kwargs=True)
                    for module in self.parts.between
                ),
                decoder.register_forward_pre_hook(self.before_decoder, with_kwargs=True),
                decoder.register_forward_hook(
                    self.after_decoder, with_kwargs=True, always_call=True
                ),
            ]
            for index, layer in enumerate(self.parts.layers):
                hooks = LayerHooks(self.cache, self.listener, index)
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
        return all(users_of(attention) == 1 for attention in filter(None, self.parts.attentions))

    def decode(
        self,
        before_decoder: DecoderHook,
        before_layers: Sequence[DecoderHook],
        *,
        observes: bool = False,
    ) -> None:
        """Register the hooks of a decoding that may be compiled, in the place of the others.

        Args:
            before_decoder: Before the decoder; it knows no cache but that in the call.
            before_layers: Likewise before each layer.
            observes: Whether attention is to show its queries to whom the masks name.
        """
        self.detach()
        for attention in filter(None, self.parts.attentions) if observes else ():
            observe(attention)
            self._observed.append(attention)
        pairs = zip(
            (self.parts.decoder, *self.parts.layers), (before_decoder, *before_layers), strict=True
        )
        self._handles = [
            module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in pairs
        ]

    def detach(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        for attention in self._routed:
            unroute(attention)
        for attention in self._observed:
            unobserve(attention)
        self._handles, self._routed, self._observed = [], [], []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the calls of another module around the same decoder as well."""
        if model in self._outer:
            yield
            return
        self._outer.append(model)
        handles = self._on_model(model) if not self.listener.is_static else []
        self._handles += handles
        try:
            yield
        finally:
            self._outer.remove(model)
            for handle in handles:
                handle.remove()
            if not self.listener.is_static and not set(handles) & set(self._handles):
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
        arguments = by_name(module, args, kwargs)
        keep = arguments.get("logits_to_keep")
        known = "logits_to_keep" in signature(type(module).forward).parameters
        last = keep if known and isinstance(keep, int) and keep > 0 else None
        self.listener.begin_call(None if arguments.get("labels") is not None else last)
        self.listener.note_call(arguments, self.parts.kinds_of(arguments))
        if not self.listener.may_drop:
            if arguments.get("labels") is not None and self.listener.may_evict:
                raise ValueError(
                    "labels must not be given on a forward where the policy acts, since its "
                    f"tokens see all before them and the loss is the same without "
                    f"{self.listener.policy}; read the context first, then score what follows "
                    "with another call of the model and the same cache"
                )
            return
        whole = {
            "labels": arguments.get("labels") is not None,
            "a tensor of logits_to_keep": isinstance(keep, Tensor),
            "output_router_logits": bool(arguments.get("output_router_logits")),
        }
        if any(whole.values()):
            raise ValueError(
                f"{' and '.join(name for name, given in whole.items() if given)} must not be "
                f"given for a prompt of which {self.listener.policy} drops tokens, since a dropped "
                "token has no logits; the logits returned are those of the last tokens that went on"
            )

    def before_between(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Take note of the mask of a module between the model and its decoder."""
        if self._carries_cache(args, kwargs):
            arguments = by_name(module, args, kwargs)
            self.listener.note_call(arguments, self.parts.kinds_of(arguments))

    def after_model(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """Conclude the call, or take it back, which may have failed behind the decoder."""
        if len(rest) == 2 and self._carries_cache(args, rest[0]):
            self.listener.end_call(failed=rest[1] is None)

    def before_decoder(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Take up a forward that carries the cache."""
        if not self._carries_cache(args, kwargs):
            return None
        return (), self.listener.begin_forward(by_name(module, args, kwargs))

    def after_decoder(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Conclude a forward, or take it back if it failed and there is no output."""
        if len(rest) < 2 or not self._carries_cache(args, rest[0]):
            return None
        if rest[1] is None:
            self.listener.fail_forward()
            return None
        return self.listener.finish_forward(rest[1])

    def _carries_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        return _carries(self.cache, args, kwargs)


def _carries(cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    return kwargs is not None and any(each is cache for each in (*args, *kwargs.values()))
