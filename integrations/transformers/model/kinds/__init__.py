"""Define the kinds of decoder layers, one file for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import DynamicCache

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind
from kvpolicy.integrations.transformers.model.kinds.chunked import ChunkedAttention
from kvpolicy.integrations.transformers.model.kinds.cross_attention import CrossAttention
from kvpolicy.integrations.transformers.model.kinds.full_attention import FullAttention
from kvpolicy.integrations.transformers.model.kinds.indexed import Indexed
from kvpolicy.integrations.transformers.model.kinds.latent_attention import LatentAttention
from kvpolicy.integrations.transformers.model.kinds.recurrent import Recurrent
from kvpolicy.integrations.transformers.model.kinds.refused import Refused
from kvpolicy.integrations.transformers.model.kinds.shared_keys import SharedKeys
from kvpolicy.integrations.transformers.model.kinds.side_by_side import SideBySide
from kvpolicy.integrations.transformers.model.kinds.sliding_window import SlidingWindow
from kvpolicy.integrations.transformers.model.kinds.tokenwise import Tokenwise

__all__ = [
    "KINDS",
    "ChunkedAttention",
    "CrossAttention",
    "FullAttention",
    "Indexed",
    "LatentAttention",
    "LayerFacts",
    "LayerKind",
    "Recurrent",
    "Refused",
    "SharedKeys",
    "SideBySide",
    "SlidingWindow",
    "Tokenwise",
]

# In the order in which they are tried; the last one accepts every layer.
KINDS: tuple[type[LayerKind], ...] = (
    SharedKeys,
    CrossAttention,
    LatentAttention,
    FullAttention,
    Indexed,
    SlidingWindow,
    ChunkedAttention,
    Tokenwise,
    Recurrent,
    SideBySide,
    Refused,
)


def kinds_of(config: Any, num_layers: int) -> list[LayerKind]:
    """Return the kind of each decoder layer, found from the model's configuration."""
    own = DynamicCache(config=config).layers
    called = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    called = called or ["full_attention"] * num_layers
    if len(own) == 1 < num_layers:  # Transformers adds more layers of this class later
        own = own * num_layers
    indexers = getattr(config, "indexer_types", None) or [None] * num_layers
    crossing = getattr(config, "cross_attention_layers", None) or ()
    pools = getattr(config, "indexer_compress_ratio", None) is not None
    latent = getattr(config, "kv_lora_rank", None) is not None
    window = getattr(config, "window_size", None)
    kinds = []
    producers = _producers(config, called)
    for index in range(num_layers):
        held_by = producers.get(index, index)
        cached = own[held_by] if held_by < len(own) else None
        facts = LayerFacts(
            index,
            called[index] if index < len(called) else "full_attention",
            None if cached is None else type(cached).__name__,
            getattr(cached, "sliding_window", None) or window,
            latent=latent,
            states=getattr(cached, "number_of_states", 1),
            indexes_blocks=hasattr(cached, "update_index"),
            crosses=index in crossing,
            untold=pools and not hasattr(cached, "indexer_position_ids"),
            indexer=indexers[index] if index < len(indexers) else None,
            producer=producers.get(index),
        )
        kinds.append(next(kind for each in KINDS if (kind := each.of(facts)) is not None))
    return kinds


def _producers(config: Any, called: Sequence[str]) -> dict[int, int]:
    """Map each layer that shares keys to the earlier layer of its type that makes them."""
    first = len(called) - (getattr(config, "num_kv_shared_layers", None) or 0)
    makers = {kind: index for index, kind in enumerate(called[:first])}
    return {i: makers[called[i]] for i in range(first, len(called)) if called[i] in makers}
