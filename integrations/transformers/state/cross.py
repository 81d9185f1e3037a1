"""Store tensors beside keys and values, such as the keys of images to which a layer attends."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layer_contents import LayerContents
from kvpolicy.integrations.transformers.state.storage import Storage, own_storage
from kvpolicy.integrations.transformers.state.tokens import SeenTokens

# The names of the tensors of images.
IMAGES = ("image_keys", "image_values")


class BesideLayer(PolicyLayer):
    """A cache layer that holds tensors beside keys and values, which no policy evicts."""

    attends = False
    holds_more = True
    plain = False

    @abc.abstractmethod
    def beside(self) -> dict[str, Tensor]:
        """Return these tensors, ``[batch, ...]`` each, by name."""

    @abc.abstractmethod
    def hold_beside(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all of these tensors; what has another name is left out."""

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | self.beside()

    def hold_tensors(self, tensors: Mapping[str, Tensor], tokens: SeenTokens) -> None:
        super().hold_tensors(tensors, tokens)
        self.hold_beside(tensors)

    def take_rows(self, rows: Tensor, tokens: SeenTokens) -> None:
        super().take_rows(rows, tokens)
        held = self.beside().items()
        self.hold_beside({name: it.index_select(0, rows.to(it.device)) for name, it in held})

    def state_nbytes(self) -> int:
        return sum(each.nbytes for each in self.beside().values())

    def restore(self, contents: LayerContents, beside: Any, tokens: SeenTokens | None) -> None:
        super().restore(contents, beside, tokens)
        self.hold_beside(beside or {})


class CrossLayer(BesideLayer):
    """A cache layer that holds keys and values of images.

    They are ``[batch, kv_heads, image_len, head_dim]`` each, unchanged on their device whatever the
    storage. ``positions`` is None.
    """

    def __init__(self, storage: Storage | None = None, room: int = 0) -> None:
        super().__init__(storage, room)
        self.images: tuple[Tensor, Tensor] | None = None

    @property
    def crossing(self) -> CrossLayer:  # an attribute there, which costs no call
        return self

    @property
    def keys(self) -> Tensor | None:
        """The keys of all images read, where the model looks them up; None before any image."""
        return None if self.images is None else self.images[0]

    @property
    def values(self) -> Tensor | None:
        return None if self.images is None else self.images[1]

    def with_images(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of more images; return the keys and values of all."""
        if self.images is not None:
            keys = torch.cat([self.images[0], keys], dim=2)
            values = torch.cat([self.images[1], values], dim=2)
        images = own_storage(keys), own_storage(values)
        self.hold_beside(dict(zip(IMAGES, images, strict=True)))
        return images

    def beside(self) -> dict[str, Tensor]:
        return {} if self.images is None else dict(zip(IMAGES, self.images, strict=True))

    def hold_beside(self, tensors: Mapping[str, Tensor]) -> None:
        self.is_initialized = IMAGES[0] in tensors
        self.images = None
        if self.is_initialized:
            keys, values = (tensors[name] for name in IMAGES)
            self.images, self.dtype, self.device = (keys, values), keys.dtype, keys.device
