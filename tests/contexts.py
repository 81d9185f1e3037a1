"""Change one field in a group of a `LayerContext`, in tests."""

from typing import Any

import attrs

from kvpolicy import LayerContext


def with_layer(context: LayerContext, **changes: Any) -> LayerContext:
    """Return a copy with other heads, history, rotary embedding or output weight."""
    return attrs.evolve(context, layer=attrs.evolve(context.layer, **changes))


def with_attention(context: LayerContext, **changes: Any) -> LayerContext:
    """Return a copy with another scaling, softcap or sinks."""
    return attrs.evolve(context, attention=attrs.evolve(context.attention, **changes))


def with_decoding(context: LayerContext, **changes: Any) -> LayerContext:
    """Return a copy with another state of the scorer, or other positions of the queries."""
    return attrs.evolve(context, decoding=attrs.evolve(context.decoding, **changes))
