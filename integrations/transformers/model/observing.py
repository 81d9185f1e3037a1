"""How queries are seen in a step of which any part may be compiled.

`routed_attention` finds its cache in a context variable, which no compiler follows. Here a layer's
mask, which the cache gives and the layer hands on to its attention function, names who is shown the
queries.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface

from kvpolicy.integrations.transformers.model.routing import (
    Attend,
    RoutedConfig,
    is_plain,
    lock,
    own_function,
)

OBSERVED = "kvpolicy_observed"


class ObservedConfig:
    """A module's configuration in all but the name of its attention function, fit to be compiled.

    Args:
        config: The module's own.
        attend: The function that it names.
    """

    _attn_implementation = OBSERVED

    def __init__(self, config: Any, attend: Attend) -> None:
        self.original = config
        self.attend = attend
        self.users = 0

    def __getattr__(self, name: str) -> Any:
        if name == "original" or name.startswith("__"):  # asked for while a copy is being made
            raise AttributeError(name)
        return getattr(self.original, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)  # a copied module is not the one that generates

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.original,)


class QueryRing(Protocol):
    """Who is shown the queries of a step of which any part may be compiled."""

    def write(self, queries: Tensor, mask: Tensor, values: Tensor | None) -> Tensor | None:
        """Take those of one token, ``[batch, query_heads, 1, head_dim]``.

        Args:
            queries: Of the token.
            mask: What it sees, as its attention function gets it.
            values: The layer's, where attention is a plain softmax of scaled products.

        Returns:
            What the token's attention gives, ``[batch, 1, query_heads, value_dim]``, where that
            comes out on the way; None where it is left to the module's own function.
        """


def observed_by(mask: Tensor, ring: QueryRing) -> Tensor:
    """Let a mask, which a layer hands to its attention function, name who sees the queries.

    The function is told of no cache, and of what it is told the mask alone comes from one.
    """
    mask._kvpolicy_ring = ring  # type: ignore[attr-defined]
    return mask


def observe(attention: Any) -> None:
    """Make an attention module call through `observed_attention`; `unobserve` takes it back.

    Raises:
        UnsupportedModelError: See `route`.
    """
    attend = own_function(attention)
    with lock:
        AttentionInterface.register(OBSERVED, observed_attention)
        routed = attention.config if isinstance(attention.config, RoutedConfig) else None
        own = attention.config if routed is None else routed.original
        if not isinstance(own, ObservedConfig):
            own = ObservedConfig(own, attend)
            if routed is None:
                attention.config = own
            else:  # of a cache that another thread has attached
                routed.original = own
        own.users += 1


def unobserve(attention: Any) -> None:
    """Take back one `observe`; the last one leaves the module as it was."""
    with lock:
        routed = attention.config if isinstance(attention.config, RoutedConfig) else None
        own = attention.config if routed is None else routed.original
        assert isinstance(own, ObservedConfig)
        own.users -= 1
        if own.users == 0 and routed is None:
            attention.config = own.original
        elif own.users == 0 and routed is not None:
            routed.original = own.original


def observed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Show the queries to whom the mask names; call the module's own attention function."""
    attend = module.config.attend
    ring = getattr(attention_mask, "_kvpolicy_ring", None)
    if ring is not None and attention_mask is not None:
        output = ring.write(query, attention_mask, value if is_plain(attend, kwargs) else None)
        if output is not None:
            return output, None
    found: tuple[Tensor, Tensor | None] = attend(
        module, query, key, value, attention_mask, **kwargs
    )
    return found
