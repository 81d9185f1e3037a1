"""Layers in which an indexer picks the keys that a query attends to."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


@attrs.frozen
class Indexed(LayerKind):
    """An index key of every token beside its keys and values, or its latent (DeepSeek Sparse).

    The indexer scores index keys for each query, which then attends to the best few. Keys, values
    and index keys of a token are kept or evicted together, so that there is one choice for all
    heads; afterwards the indexer picks among what the layer holds.

    Args:
        borrows: Whether the layer has no indexer, and attends to the slots that an earlier layer's
            has picked. It then keeps the tokens that layer keeps.
        blocks: Whether it picks blocks of slots, which are counted in what is held.
    """

    name: ClassVar[str] = "with an indexer"
    borrows: bool = False
    blocks: bool = False

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        if layer.indexes_blocks:
            return cls(blocks=True)
        if layer.cached_as != "DynamicIndexedLayer" or layer.untold:
            return None
        return cls(borrows=layer.indexer == "shared")
