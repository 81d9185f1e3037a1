"""Define layers in which an indexer picks the keys that a query attends to."""

from __future__ import annotations

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


class Indexed(LayerKind):
    """A layer whose indexer picks keys by an extra index key of each token (DeepSeek Sparse).

    A latent may take the place of keys and values. The indexer scores the index keys for each
    query, which then attends to the best few. The keys, values and index key of a token are kept or
    evicted together, so that all heads keep the same tokens. Afterwards the indexer picks among the
    tokens that the layer holds, and blocks of tokens are formed anew from these. Policies see all
    keys, not only the picked ones.

    No tokens are dropped between a layer and a later one that uses the slots picked by its indexer.
    Layers with an indexer run for all tokens that reach them, and nothing is compiled. Where blocks
    are counted with padding, padded rows are refused. A layer that borrows the slots picked by an
    earlier layer's indexer keeps the same tokens as that layer.
    """

    name = "with an indexer"
    picks = True

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        if layer.indexes_blocks:
            return cls(blocks=True)
        if layer.cached_as != "DynamicIndexedLayer" or layer.untold:
            return None
        return cls(borrows=layer.indexer == "shared")
