"""Let a cache see queries: attention modules call a function that is registered here.

Transformers looks the attention function up by a name in the module's configuration. While a cache
is attached, the attention modules of its model read a configuration that names `routed_attention`.
This function calls the original one, and gives the queries to the cache that the keys come from.
Calls with any other cache pass straight through. The attention implementation in the model's own
configuration, by which masks are made, does not change.

A call is recognised by its keys: they are the tensor that `update` returned, which a context
variable holds. A module with latent attention computes other keys from that tensor, one for each
token; its call is recognised by the module.
"""

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
from torch import Tensor, nn
from transformers import AttentionInterface

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.model.masks import (
    DENSE,
    causal_mask,
    of_picked,
    of_picked_blocks,
)
from kvpolicy.integrations.transformers.surface import (
    ATTN_IMPLEMENTATION,
    attention_functions,
    sdpa_attention_forward,
)
from kvpolicy.layer_inputs import AttentionSettings

ROUTED = "kvpolicy_routed"
# Arguments of attention functions that change the result, except for the scaling.
_CHANGING = ("position_bias", "cache", "softcap", "s_aux")

Attend = Callable[..., tuple[Tensor, Tensor | None]]


@attrs.frozen(eq=False)
class AttentionInputs:
    """The queries, keys and values that an attention function gets, and its score settings.

    They are ``[batch, heads, length, head_dim]``; keys and values have KV heads, and the head
    dimension of values may differ.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scores: AttentionSettings


def without_queries(query_heads: int, keys: Tensor, values: Tensor) -> AttentionInputs:
    """Make the inputs of an attention that cannot be observed, with keys and values only."""
    batch, kv_heads, _, head_dim = keys.shape
    heads = query_heads if query_heads and query_heads % kv_heads == 0 else kv_heads
    none = keys.new_empty(batch, heads, 0, head_dim)
    return AttentionInputs(none, keys, values, AttentionSettings(head_dim**-0.5))


# The `PassRun` that waits for queries in this thread, the index of the layer, its attention module,
# and the keys that `update` gave the layer.
waiting: ContextVar[tuple[Any, int, nn.Module, Tensor] | None] = ContextVar(
    "kvpolicy_waiting", default=None
)

# Functions that modules call in place of their own, by the id of the module.
_replacing: ContextVar[dict[int, Attend]] = ContextVar("kvpolicy_replacing", default={})  # noqa: B039 -- never written to

# Whether this thread is inside an attention function.
_inside: ContextVar[bool] = ContextVar("kvpolicy_inside", default=False)

lock = threading.Lock()  # held while a module's configuration is replaced


class RoutedConfig:
    """A module's configuration that names `routed_attention` as its attention function.

    While the attention function runs, it reads the original name here. A copy of the module gets
    the original configuration.
    """

    def __init__(self, config: Any) -> None:
        self.original = config
        self.users = 0

    def attention_name(self) -> str:
        """Return `ROUTED`; inside of `routed_attention`, the name of the module's own function."""
        return str(getattr(self.original, ATTN_IMPLEMENTATION)) if _inside.get() else ROUTED

    def __getattr__(self, name: str) -> Any:
        if name == "original" or name.startswith("__"):  # asked for while a copy is being made
            raise AttributeError(name)
        return getattr(self.original, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.original,)


setattr(RoutedConfig, ATTN_IMPLEMENTATION, property(RoutedConfig.attention_name))


def route(attention: Any) -> None:
    """Make an attention module call `routed_attention`, until `unroute` undoes it."""
    _functions(type(attention).forward)
    with lock:
        AttentionInterface.register(ROUTED, routed_attention)
        routed = attention.config
        if type(routed) is not RoutedConfig:
            routed = RoutedConfig(routed)
            # Torch's own asks several times for the class, which configurations tell slowly.
            object.__setattr__(attention, "config", routed)
        routed.users += 1


def unroute(attention: Any) -> None:
    """Undo one `route` of an attention module; the last one restores the module."""
    with lock:
        routed = attention.config
        assert isinstance(routed, RoutedConfig)
        routed.users -= 1
        if routed.users == 0:
            object.__setattr__(attention, "config", routed.original)


@contextmanager
def replaced(attention: Any, function: Attend) -> Iterator[None]:
    """Let an attention module call ``function`` in this thread, in a `with` block."""
    route(attention)
    token = _replacing.set({**_replacing.get(), id(attention): function})
    try:
        yield
    finally:
        _replacing.reset(token)
        unroute(attention)


def eager_function(attention: Any) -> Attend:
    """Return the eager attention function that a module falls back to."""
    _, default = _functions(type(attention).forward)
    if default is None:
        raise UnsupportedModelError(
            f"{type(attention).__name__} must have an eager attention function, got none"
        )
    eager: Attend = default
    return eager


def users_of(attention: Any) -> int:
    """Count the caches attached to an attention module, for which it is routed."""
    config = attention.config
    return config.users if isinstance(config, RoutedConfig) else 0


def routed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as the module would, and show the queries to the cache that gave the keys."""
    inside = _inside.set(True)
    try:
        attend = _replacing.get().get(id(module)) or own_function(module)
        if "indices" in kwargs or "block_indices" in kwargs:
            attention_mask = _as_picked(module, query, key, attention_mask, kwargs)
        pending = waiting.get()
        if pending is None or not _made_of(key, module, *pending[2:]):
            return attend(module, query, key, value, attention_mask, **kwargs)
        waiting.set(None)
        forward, index = pending[:2]
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = AttentionSettings(scaling, kwargs.get("softcap"), kwargs.get("s_aux"))
        inputs = AttentionInputs(query, key, value, scores)
        output: tuple[Tensor, Tensor | None] = forward.attend(
            index, attend, module, inputs, attention_mask, **kwargs
        )
        return output
    finally:
        _inside.reset(inside)


def _made_of(key: Tensor, module: nn.Module, own: nn.Module, given: Tensor) -> bool:
    """True if keys are those that a layer's ``own`` module was given, or were computed from them.

    A module with latent attention computes one key for each token.
    """
    alike = (key.shape[0], key.shape[-2]) == (given.shape[0], given.shape[-2])
    return key is given or (module is own and alike)


def _as_picked(module: Any, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> Any:
    """Restrict a mask to the keys that the module's indexer has picked, if it has one.

    A module that does not know its function's name leaves this to the function.
    """
    implementation = getattr(module.config, ATTN_IMPLEMENTATION)
    if implementation not in DENSE:  # kernels apply the choice themselves
        return mask
    slots, blocks = kwargs.pop("indices", None), kwargs.pop("block_indices", None)
    if slots is None and blocks is None:
        return mask
    if mask is None:
        mask = causal_mask(key.shape[2], query.shape[2], implementation, query.dtype, query.device)
    if slots is not None:
        mask = of_picked(mask, slots)
    if blocks is not None:
        mask = of_picked_blocks(mask, blocks, module.indexer.block_size, query.shape[1])
    return mask


def is_plain(attend: Attend, kwargs: dict[str, Any]) -> bool:
    """True if an attention function is known to be a plain softmax of scaled products."""
    plain = attend is sdpa_attention_forward and not kwargs.get("dropout")
    return plain and all(kwargs.get(name) is None for name in _CHANGING)


def own_function(attention: Any) -> Attend:
    """Return the attention function that a module would call without any attached cache."""
    interface, default = _functions(type(attention).forward)
    config = attention.config
    name = getattr(config.original if type(config) is RoutedConfig else config, ATTN_IMPLEMENTATION)
    try:
        function: Attend = interface[name]
    except KeyError:
        function = interface.get_interface(name, default)
    return function


@functools.lru_cache(maxsize=64)
def _functions(method: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the registry where a module looks up attention functions, and its default one."""
    interface, eager = attention_functions(method)
    if interface is None:
        raise UnsupportedModelError(
            f"model must call its attention through Transformers' AttentionInterface, but "
            f"{method.__qualname__} does not; the policy cannot see its queries"
        )
    return interface, eager
