"""Store the keys and values of images, for a layer that attends to images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layer_contents import LayerContents
from kvpolicy.integrations.transformers.state.storage import Storage, own_storage
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


class CrossLayer(PolicyLayer):
    """A cache layer that holds keys and values of images, which no policy evicts.

    They are ``[batch, kv_heads, image_len, head_dim]`` each, unchanged on their device whatever the
    storage. ``positions`` is None.
    """

    attends = False
    holds_more = True
    plain = False

    def __init__(self, storage: Storage | None = None, room: int = 0) -> None:
        super().__init__(storage, room)
        self.images: tuple[Tensor, Tensor] | None = None

    @property
    def crossing(self) -> CrossLayer:  # an attribute there, which costs no call
        """See `PolicyLayer`."""
        return self

    @property
    def keys(self) -> Tensor | None:
        """The keys of all images read, where the model looks them up; None before any image."""
        return None if self.images is None else self.images[0]

    @property
    def values(self) -> Tensor | None:
        """See `keys`."""
        return None if self.images is None else self.images[1]

    def with_images(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of more images; return the keys and values of all."""
        if self.images is not None:
            keys = torch.cat([self.images[0], keys], dim=2)
            values = torch.cat([self.images[1], values], dim=2)
        images = own_storage(keys), own_storage(values)
        self.hold_images(images)
        return images

    def hold_images(self, images: tuple[Tensor, Tensor] | None) -> None:
        """Replace all image keys and values that the layer holds; None removes them."""
        self.images, self.is_initialized = images, images is not None
        if images is not None:
            self.dtype, self.device = images[0].dtype, images[0].device

    def tensors(self) -> dict[str, Tensor]:
        """See `PolicyLayer.tensors`."""
        return dict(zip(("image_keys", "image_values"), self.images or (), strict=False))

    def hold_tensors(self, tensors: Mapping[str, Tensor], tokens: SeenTokens) -> None:
        """See `PolicyLayer.hold_tensors`."""
        super().hold_tensors(tensors, tokens)
        self.hold_images((tensors["image_keys"], tensors["image_values"]) if tensors else None)

    def take_rows(self, rows: Tensor, tokens: SeenTokens) -> None:
        """See `PolicyLayer.take_rows`."""
        super().take_rows(rows, tokens)
        if self.images is not None:
            keys, values = (each.index_select(0, rows.to(each.device)) for each in self.images)
            self.hold_images((keys, values))

    def state_nbytes(self) -> int:
        """See `PolicyLayer.state_nbytes`."""
        return sum(each.nbytes for each in self.images or ())

    def beside(self) -> Any:
        """Return the image keys and values that the layer holds; see `PolicyLayer.beside`."""
        return self.images

    def restore(self, contents: LayerContents, beside: Any, tokens: SeenTokens | None) -> None:
        """See `PolicyLayer.restore`."""
        super().restore(contents, beside, tokens)
        self.hold_images(beside)
