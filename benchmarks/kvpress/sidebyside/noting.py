"""Record, by hooks, the positions and visible slots of a model's forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


@contextmanager
def noting_positions(model: PreTrainedModel) -> Iterator[list[list[int]]]:
    """Record the rotary positions of the first row in every forward."""
    noted: list[list[int]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        noted.append(positions[0].tolist())

    handle = model.model.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield noted
    finally:
        handle.remove()


@contextmanager
def noting_visible(model: PreTrainedModel) -> Iterator[list[list[int] | None]]:
    """Record, per forward, the slots that each row's last token attends to in the first layer.

    The record of a forward without a mask, in which it sees all slots, is None.
    """
    noted: list[list[int] | None] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if mask is None:
            noted.append(None)
            return
        visible = mask if mask.dtype == torch.bool else mask == 0  # eager attention adds its mask
        noted.append(visible[:, 0, -1].sum(dim=-1).tolist())

    first_layer = model.model.layers[0].self_attn
    handle = first_layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield noted
    finally:
        handle.remove()
