"""Record all that forwards change in a cache, so that undoing a forward is one assignment.

The dispatcher keeps the current `ReadState` and records one before every call of a model. If the
call raises, in the decoder or in the head after it, the recorded state is assigned at once. If it
is interrupted, as by Ctrl-C, this happens when the cache is next used or its ``attached`` block
ends. Stored tensors are replaced, or written to behind the slots that a recorded state holds. A
copy of a cache (`copy.copy`, `copy.deepcopy`, pickle) holds what the cache held before a running
forward, is attached to nothing, and changes independently.

The state of a running forward is in its cache and in a context variable. A cache that one thread
has attached, or reads with, raises `CacheInUseError` in other threads.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from kvpolicy.integrations.transformers.forward.chunks import Chunks
from kvpolicy.integrations.transformers.state.layers import LayersHeld
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.frozen(eq=False)
class ReadState:
    """An immutable record of what a cache has read; by default it has read nothing.

    Args:
        propagated: For each layer that dropped tokens in the last prompt, the positions it passed
            on.
        starts_turn: Whether the next forward starts a turn, so that the policy acts on it.
        prompt_end: Number of columns seen at the end of the prompt that is being read; None if it
            ends with the next forward.
        chunks: The record of the earlier chunks of this prompt; None if there were none.
        layers: What the layers hold, as it was when this was recorded; None in the state that a
            cache is in.
    """

    tokens: SeenTokens | None = None
    propagated: Mapping[int, Tensor] = attrs.field(factory=dict)
    starts_turn: bool = False
    prompt_end: int | None = None
    chunks: Chunks | None = None
    layers: LayersHeld | None = None
