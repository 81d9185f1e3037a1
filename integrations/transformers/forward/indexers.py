"""Give the indexer of a layer the positions of the keys it holds and of new keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.inputs import take_columns
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def new_places(layers: Sequence[PolicyLayer], slots: Tensor | None) -> Tensor | None:
    """Return the position ids ``[axes, batch, new_len]`` of tokens for a layer's indexer, if any.

    A model that rotates index keys late gives them to one of the layers. ``slots`` are the
    forward's tokens that reach the layer; None for all.
    """
    given = (each.indexed.new_places for each in layers if each.indexed is not None)
    places = next((each for each in given if each is not None), None)
    return places if places is None or slots is None else take_columns(places, slots, 1, 2)


def with_positions(
    layer: IndexedLayer,
    hidden: Tensor,
    kwargs: dict[str, Any],
    rotary: Rotary | None,
    order: Tensor | None,
) -> dict[str, Any]:
    """Return a layer's arguments ``kwargs`` with the position ids that its indexer needs.

    ``rotary`` is the decoder's rotary embedding, for the index keys that are held; ``order`` is the
    slot that comes to each place, None to keep the order.
    """
    if layer.blocks:  # blocks are counted by slot
        slots = torch.arange(hidden.shape[1], device=hidden.device) + layer.kept_len
        kwargs = {**kwargs, "position_ids": slots.expand(hidden.shape[0], -1)}
    places = layer.places()
    if places is None:
        return kwargs
    assert rotary is not None
    pairs = zip(rotary(hidden, places), kwargs["position_embeddings"], strict=True)
    turns = tuple(torch.cat([held, new], dim=1) for held, new in pairs)
    if order is not None:
        turns = tuple(take_columns(each, order[:, 0]) for each in turns)
    return {**kwargs, "position_embeddings": turns}
