"""Record all that forwards change in a cache, so that undoing one is a single assignment."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from kvpolicy.integrations.transformers.forward.chunks import Chunks
from kvpolicy.integrations.transformers.state.layers import LayersHeld
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.frozen(eq=False)
class ReadState:
    """What a cache has read. It is immutable; by default nothing was read.

    Args:
        tokens: The tokens seen; None if none.
        propagated: For each layer that dropped tokens in the last prompt, the positions it passed
            on.
        starts_turn: Whether the next forward starts a turn, so that the policy acts on it.
        prompt_end: Number of columns seen at the end of the prompt that is being read; None if it
            ends with the next forward.
        chunks: What the earlier chunks of that prompt left; None if there were none.
        layers: What the layers hold, as it was when this was recorded; None in the state that a
            cache is in.
    """

    tokens: SeenTokens | None = None
    propagated: Mapping[int, Tensor] = attrs.field(factory=dict)
    starts_turn: bool = False
    prompt_end: int | None = None
    chunks: Chunks | None = None
    layers: LayersHeld | None = None
