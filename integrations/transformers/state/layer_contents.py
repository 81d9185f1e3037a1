"""Record the facts of one layer of a model, and what a cache holds for it."""

import attrs
from torch import Tensor

from kvpolicy.integrations.transformers.model.layer_trial import OutputProjection
from kvpolicy.integrations.transformers.model.parallel import HeadSharding
from kvpolicy.integrations.transformers.model.rotary import (
    Gapless,
    GivenPlaces,
    LayerRotary,
    RotaryChannels,
)
from kvpolicy.integrations.transformers.state.recent_queries import RecentQueries
from kvpolicy.integrations.transformers.state.storage import StoredKV


@attrs.define(eq=False)
class LayerFacts:
    """A record of what is known of one layer of the attached model.

    Args:
        expands: Whether attention computes keys and values of more heads from the tensors held, as
            latent attention does.
        shows_queries: Whether the queries of its attention can be observed.
        turns: How rotary embedding rotates its keys, if the policy asks for it.
        projection: Its output projection, if the policy asks for it.
    """

    query_heads: int = 0
    spread: HeadSharding = attrs.field(factory=HeadSharding)
    expands: bool = False
    shows_queries: bool = True
    turns: RotaryChannels | None = None
    projection: OutputProjection | None = None

    def rotary(self, read_at: Gapless | GivenPlaces | None) -> LayerRotary:
        """Return the rotary embedding of the layer's keys; see `LayerRotary`."""
        assert self.turns is not None
        return LayerRotary(self.turns, read_at)

    def weight(self, values: Tensor) -> Tensor:
        """Return `LayerInputs.output_weight` in the dtype and on the device of ``values``."""
        assert self.projection is not None
        return self.projection.weight(values.dtype, values.device)


@attrs.frozen(eq=False)
class LayerContents:
    """The immutable contents of a cache layer, so that a forward is undone by assigning old ones.

    Args:
        held: The keys and values; None before the first forward.
        chosen: ``[batch, kv_heads or 1, chosen_len]`` int64, the positions of the tokens that the
            policy kept, -1 on padding; tokens appended since are not counted.
        padded: Whether some row or head holds fewer tokens than others.
        ragged: Whether some head holds fewer tokens than another head of the same row.
        counts: For each row, the number of tokens that the policy kept in each head; None if heads
            differ, or if the number is unknown.
        observed: The decoded queries and scorer state by which the policy evicts during an answer.
    """

    held: StoredKV | None = None
    chosen: Tensor | None = None
    padded: bool = False
    ragged: bool = False
    counts: tuple[int, ...] | None = None
    observed: RecentQueries = attrs.field(factory=RecentQueries)
