"""Observe queries in a decoding step that may be compiled.

`routed_attention` finds its cache in a context variable, which the compiler cannot follow. Here the
cache stores the object that receives the queries on the layer's mask, and the layer passes that
mask to its attention function.
"""

from __future__ import annotations

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
from kvpolicy.integrations.transformers.surface import StandInConfig

OBSERVED = "kvpolicy_observed"


class ObservedConfig(StandInConfig):
    """A module's configuration that names `observed_attention`, and that can be compiled.

    Args:
        config: The module's own configuration.
        attend: The attention function that it names.
    """

    attention_name = OBSERVED

    def __init__(self, config: Any, attend: Attend) -> None:
        super().__init__(config)
        self.attend = attend


class QueryRing(Protocol):
    """A protocol for the buffer that receives the queries of compiled decoding steps."""

    def write(self, queries: Tensor, mask: Tensor, values: Tensor | None) -> Tensor | None:
        """Store one token's queries, ``[batch, query_heads, 1, head_dim]``.

        Args:
            queries: Queries of the token.
            mask: The mask of the token, as its attention function gets it.
            values: The layer's values, if attention is a plain softmax of scaled products; else
                None.

        Returns:
            The token's attention output, ``[batch, 1, query_heads, value_dim]``, if it is a
            by-product; None if the module's own function must compute it.
        """


def observed_by(mask: Tensor, ring: QueryRing) -> Tensor:
    """Attach the buffer for a layer's queries to the layer's mask; return the mask.

    An attention function gets no cache; the mask is the only argument that comes from one.
    """
    mask._kvpolicy_ring = ring  # type: ignore[attr-defined]
    return mask


def observe(attention: Any) -> None:
    """Make an attention module call `observed_attention`, until `unobserve` undoes it.

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
            else:  # another thread has attached a cache to this module
                routed.original = own
        own.users += 1


def unobserve(attention: Any) -> None:
    """Undo one `observe` of an attention module; the last one restores the module."""
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
    """Store the queries in the buffer attached to the mask, then attend as the module would."""
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
