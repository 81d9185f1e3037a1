"""Attach a cache to a model: by hooks, and while it reads by a function around each layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from kvpolicy.integrations.transformers.model.modules import by_name, signature
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.model.routing import lock, route, unroute, users_of
from kvpolicy.integrations.transformers.surface import CACHE, cache_name

Hook = Callable[..., Any]


class AroundLayer:
    """The function that runs in place of a decoder layer's `forward` while a cache reads.

    It stands there for the length of a forward of the decoder only, so that what others do to the
    layer between two forwards, such as adding or removing hooks, is as without a cache. A call that
    carries none of the reading caches passes straight through.

    Attributes:
        users: The attachments of the caches that are reading. The tuple is replaced, never changed,
            since other threads go through it.
    """

    def __init__(self, index: int, module: nn.Module) -> None:
        self.index, self.module = index, module
        self.users: tuple[Attachment, ...] = ()
        self._replaced = vars(module).get("forward")  # such as accelerate's
        self.forward: Callable[..., Any] = module.forward
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer for the cache that the call carries."""
        for each in self.users:
            if carries(each.cache, args, kwargs):
                break
        else:
            return self.forward(*args, **kwargs)
        run = each.listener.run
        if run is None or self.index in run.alone:  # None after Ctrl-C, until the next forward
            return self.forward(*args, **kwargs)
        if len(args) == 1 and kwargs:
            hidden = args[0]
        else:  # some models pass more arguments than the input by position, others pass none so
            kwargs = by_name(self.module, args, kwargs)
            # The first argument after self.
            hidden = kwargs.pop(list(signature(type(self.module).forward).parameters)[1])
        return run.layer(self, hidden, kwargs)

    def remove(self) -> None:
        """Give the layer the `forward` again that it had before."""
        own = vars(self.module)
        if own.get("forward") is not self:
            return
        if self._replaced is None:
            del own["forward"]
        else:
            own["forward"] = self._replaced


class Attachment:
    """The hooks that attach one cache to a model, and act only on calls with this cache.

    Several caches, several models and calls without a cache do not affect each other. `detach`
    leaves no hook and no attribute on the model.

    Args:
        listener: The cache's `ForwardDispatcher`, whose file imports this one. The hooks call it
            when a call carries the cache.

    Attributes:
        outer: The modules around the decoder whose calls are watched.
    """

    def __init__(self, cache: Cache, listener: Any, parts: ModelParts) -> None:
        self.cache: Any = cache
        self.listener = listener
        self.parts = parts
        self.outer: list[nn.Module] = [parts.model]
        self._handles: list[RemovableHandle] = []
        self._around: list[AroundLayer] = []
        self._routed: list[nn.Module] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        idle = object.__new__(Attachment)  # of a copy of the model, where hooks do nothing
        idle.cache = object()  # no call carries it
        return idle

    def attach(self) -> None:
        """Register all hooks on the model; remove them again if this fails."""
        self.detach()
        try:
            for attention in filter(None, self.parts.attentions):
                route(attention)
                self._routed.append(attention)
            self._handles = [
                *(handle for model in self.outer for handle in self._on_model(model)),
                *(self._hooked_before(each, self.before_between) for each in self.parts.between),
                *self._hooked(self.parts.decoder, self.before_decoder, self.after_decoder),
            ]
        except BaseException:
            self.detach()
            raise

    @property
    def alone(self) -> bool:
        """True if no other cache is attached to the model, so that decoding may be compiled."""
        return all(users_of(attention) == 1 for attention in filter(None, self.parts.attentions))

    def decode(self, before_decoder: Hook, before_layers: Sequence[Hook]) -> None:
        """Replace all hooks by those for decoding steps that may be compiled."""
        self.detach()
        pairs = zip(
            (self.parts.decoder, *self.parts.layers), (before_decoder, *before_layers), strict=True
        )
        self._handles = [
            module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in pairs
        ]

    def detach(self) -> None:
        """Remove all hooks, which leaves the model as it was before."""
        self._leave_layers()
        for handle in self._handles:
            handle.remove()
        for attention in self._routed:
            unroute(attention)
        self._handles, self._routed = [], []

    def _enter_layers(self) -> None:
        """Put a function around every layer, for the forward that begins."""
        self._leave_layers()
        with lock:
            for index, layer in enumerate(self.parts.layers):
                found = vars(layer).get("forward")
                around = found if isinstance(found, AroundLayer) else AroundLayer(index, layer)
                around.users = (*around.users, self)
                self._around.append(around)

    def _leave_layers(self) -> None:
        with lock:
            for around in self._around:
                around.users = tuple([each for each in around.users if each is not self])
                if not around.users:
                    around.remove()
            self._around = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Hook another model around the same decoder too, for the length of a `with` block."""
        if model in self.outer:
            yield
            return
        self.outer.append(model)
        handles = self._on_model(model) if not self.listener.is_unhooked else []
        self._handles += handles
        try:
            yield
        finally:
            self.outer.remove(model)
            for handle in handles:
                handle.remove()
            if not self.listener.is_unhooked and not set(handles) & set(self._handles):
                self.attach()  # all hooks were registered again in between, also on this model

    def _on_model(self, model: nn.Module) -> list[RemovableHandle]:
        return self._hooked(model, self.before_model, self.after_model)

    def _hooked(self, module: nn.Module, before: Hook, after: Hook) -> list[RemovableHandle]:
        # Partial functions, with which a copy of the model gets a copy of this object.
        after = functools.partial(self._run_after, after)
        handle = module.register_forward_hook(after, with_kwargs=True, always_call=True)
        return [self._hooked_before(module, before), handle]

    def _hooked_before(self, module: nn.Module, hook: Hook) -> RemovableHandle:
        before = functools.partial(self._run_before, hook)
        return module.register_forward_pre_hook(before, with_kwargs=True)

    def _run_before(
        self, hook: Hook, module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a hook before a module if the call carries the cache, with all arguments by name."""
        # Torch looks up if a hook takes keyword arguments only when it calls the hook. If another
        # thread detaches its cache from the model just before, the hook is called without them. It
        # is a hook of that thread, whose own forwards have ended, so there is nothing to do.
        if kwargs is None or not carries(self.cache, args, kwargs):
            return None
        name = cache_name(type(module).forward)
        if name is not None and kwargs.get(name) is not self.cache:
            others = {key: each for key, each in kwargs.items() if each is not self.cache}
            kwargs = {**others, name: self.cache} if len(others) < len(kwargs) else kwargs
        found = hook(module, by_name(module, args, kwargs))
        return (args, kwargs) if found is None else found

    def _run_after(self, hook: Hook, module: nn.Module, args: Any, *rest: Any) -> Any:
        """Run a hook after a module if the call carried the cache; it gets None if that failed."""
        if len(rest) == 2 and carries(self.cache, args, rest[0]):
            return hook(rest[1])
        return None

    def before_model(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        """Hook before the model: begin its call; refuse it if it needs dropped tokens' logits."""
        keep = arguments.get("logits_to_keep")
        known = "logits_to_keep" in signature(type(module).forward).parameters
        last = keep if known and isinstance(keep, int) and keep > 0 else None
        self.listener.begin_call(None if arguments.get("labels") is not None else last)
        self.listener.note_call(arguments, self.parts.kinds_of(arguments))
        if not self.listener.may_drop:
            if arguments.get("labels") is not None and self.listener.may_evict:
                raise ValueError(
                    "labels must not be given in a forward in which the policy acts: its tokens "
                    "see all tokens before them, so that the loss is the same as without "
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
                f"given if {self.listener.policy} drops tokens of the prompt, since a dropped "
                "token has no logits; the logits returned are those of the last tokens, which "
                "were not dropped"
            )

    def before_between(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        """Hook before a module that calls the decoder: remember its mask and its tokens' kinds."""
        self.listener.note_call(arguments, self.parts.kinds_of(arguments))

    def after_model(self, output: Any) -> None:
        """Hook after the model: finish its call, or undo it if it failed, perhaps in the head."""
        self.listener.end_call(failed=output is None)

    def before_decoder(self, module: nn.Module, arguments: dict[str, Any]) -> Any:
        """Hook before the decoder: begin a forward if the call carries the cache."""
        self._enter_layers()
        arguments = self.listener.begin_forward(arguments)
        if not self._around:  # a forward of the prompt alone, before its drafts, has ended
            self._enter_layers()
        return (), arguments

    def after_decoder(self, output: Any) -> Any:
        """Hook after the decoder: finish the forward, or undo it if it failed."""
        try:
            if output is None:
                return self.listener.fail_forward()
            return self.listener.finish_forward(output)
        finally:
            self._leave_layers()


def carries(cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """True if a call has a cache among its arguments."""
    if kwargs is None:
        return False
    if kwargs.get(CACHE) is cache:  # as almost all models name it
        return True
    return any(each is cache for each in (*args, *kwargs.values()))
