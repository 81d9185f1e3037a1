"""Hold the keys and values of a layer to which a model without hooks appends tokens directly."""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers.model.routing import own_function
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.storage import COPIED_BYTES, Plain


class Growing(Protocol):
    """A protocol for a layer's keys and values that grow with each decoded token.

    Attributes:
        start: Number of slots of which the layer's own record knows.
    """

    start: int

    @property
    def length(self) -> int:
        """The number of slots per row and head, padding included."""

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens; return what the layer's attention module gets as keys and values."""

    def give(self, layer: PolicyLayer, length: int) -> None:
        """Let the cache's layer hold the first ``length`` slots."""


class GrowingKeys:
    """A layer's growing keys and values, if all rows and heads hold the same number of tokens.

    What was there before a token is not remembered, so that its memory, which the processor has at
    hand, is used again.

    Args:
        held: What the layer holds.
        room: Number of slots to reserve, where reserved slots spare copies.
    """

    def __init__(self, held: Plain, room: int = 0) -> None:
        # All slots, as long as they are so few that all are copied with each token.
        few = held.is_full and not held.grows_in_place
        self._few: tuple[Tensor, Tensor] | None = held.read() if few else None
        self._held = held.with_room(room) if held.grows_in_place and room > 0 else held
        self.start = held.length

    @property
    def length(self) -> int:
        """See `Growing.length`."""
        return self._held.length if self._few is None else self._few[0].shape[2]

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Growing.write`."""
        few = self._few
        if few is None:
            self._held = self._held.appended(keys, values)
            return self._held.read()
        self._few = few = torch.cat([few[0], keys], dim=2), torch.cat([few[1], values], dim=2)
        if few[0].nbytes > COPIED_BYTES:
            self._held, self._few = self._whole(), None
        return few

    def read(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values."""
        return self._held.read() if self._few is None else self._few

    def give(self, layer: PolicyLayer, length: int) -> None:
        """See `Growing.give`."""
        held = self._whole()
        self.start = length
        held = held if held.length == length else held.first(length)
        layer.contents = attrs.evolve(layer.contents, held=held)

    def _whole(self) -> Plain:
        return self._held if self._few is None else Plain.of(*self._few, self._held.device)


class GrowingHeads:
    """A layer's growing keys and values, if heads hold different numbers of tokens.

    Each head of each row has tensors of its own without padding, so that its attention needs no
    mask. `attend` is called in place of the layer's attention function. It recognises its call by
    the keys that `write` returned, which are only those of the new token.

    Args:
        layer: The cache's layer.
        module: The layer's attention module.
    """

    def __init__(self, layer: PolicyLayer, module: nn.Module) -> None:
        held, chosen = layer.contents.held, layer.contents.chosen
        assert held is not None
        assert chosen is not None
        keys, values = held.read()
        self._rows, self._own_function = keys.shape[0], own_function(module)
        self._padding = (chosen < 0).sum(dim=2).flatten().tolist()  # of each head, on the left
        self._heads = [
            GrowingKeys(Plain.of(key[None, None, pad:], value[None, None, pad:], keys.device))
            for key, value, pad in zip(
                keys.flatten(0, 1), values.flatten(0, 1), self._padding, strict=True
            )
        ]
        self._given: Tensor | None = None
        self.start = keys.shape[2]

    @property
    def length(self) -> int:
        """See `Growing.length`."""
        return self._heads[0].length + self._padding[0]

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Growing.write`."""
        count, each = keys.shape[2], (len(self._heads), 1, 1)
        new_keys = keys.reshape(*each, count, keys.shape[3]).unbind()
        new_values = values.reshape(*each, count, values.shape[3]).unbind()
        for head, key, value in zip(self._heads, new_keys, new_values, strict=True):
            head.write(key, value)
        self._given = keys
        return keys, values

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of one new token per row; see the class for other calls.

        Raises:
            UnsupportedGenerationError: There are several tokens.
        """
        if key is not self._given:
            return self._own_function(module, query, key, value, mask, **kwargs)
        if query.shape[2] != 1:
            raise UnsupportedGenerationError(
                "a PolicyCache must not be read by other calls of the model while generate decodes "
                f"with it, got one with {query.shape[2]} tokens; use a copy of it"
            )
        queries = query.reshape(len(self._heads), 1, 1, -1, query.shape[3]).unbind()
        scale = kwargs.get("scaling")
        outputs = [
            scaled_dot_product_attention(own, *head.read(), scale=scale)
            for own, head in zip(queries, self._heads, strict=True)
        ]
        return torch.cat(outputs, dim=2).view(self._rows, 1, query.shape[1], -1), None

    def give(self, layer: PolicyLayer, length: int) -> None:
        """See `Growing.give`."""
        chosen, behind = layer.contents.chosen, layer.behind
        assert chosen is not None
        layer.load(self._padded(0, length), self._padded(1, length), chosen, layer.tokens)
        layer.behind, self.start = behind, length

    def _padded(self, which: int, length: int) -> Tensor:
        """Return all keys (0) or values (1), ``[batch, kv_heads, length, dim]``, 0 on padding."""
        heads = [head.read()[which] for head in self._heads]
        whole = heads[0].new_zeros(self._rows, len(heads) // self._rows, length, heads[0].shape[3])
        for into, own, pad in zip(whole.flatten(0, 1), heads, self._padding, strict=True):
            into[pad:] = own[0, 0, : length - pad]
        return whole
