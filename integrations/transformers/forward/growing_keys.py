"""Hold the keys and values of a layer to which a model without hooks appends tokens directly.

If an answer is bounded, the queries by which layers will evict are recorded, too.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers.model.routing import Attend, own_function
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.storage import COPIED_BYTES, Plain
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


class Growing(Protocol):
    """A protocol for a layer's keys and values that grow with each decoded token.

    Attributes:
        start: Number of slots of which the layer's own record knows.
        given: The keys that `write` returned last.
    """

    start: int
    given: Tensor | None

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
        few = held.is_at_hand and not held.grows_in_place
        self._few: tuple[Tensor, Tensor] | None = held.read() if few else None
        self._held = held.with_room(room) if held.grows_in_place and room > 0 else held
        self.start = held.length
        self.given: Tensor | None = None

    @property
    def length(self) -> int:
        """See `Growing.length`."""
        return self._held.length if self._few is None else self._few[0].shape[2]

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Growing.write`."""
        few = self._few
        if few is None:
            self._held = self._held.appended(keys, values)
            few = self._held.read()
        else:
            self._few = few = torch.cat([few[0], keys], dim=2), torch.cat([few[1], values], dim=2)
            if few[0].nbytes > COPIED_BYTES:
                self._held, self._few = self._whole(), None
        self.given = few[0]
        return few

    def read(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values."""
        return self._held.read() if self._few is None else self._few

    def give(self, layer: PolicyLayer, length: int) -> None:
        """See `Growing.give`."""
        whole = self._whole()
        self.start = length
        held = whole if whole.length == length else whole.first(length)
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
        # Of each head, on the left.
        self._padding: list[int] = (chosen < 0).sum(dim=2).flatten().tolist()
        self._heads = [
            GrowingKeys(Plain.of(key[None, None, pad:], value[None, None, pad:], keys.device))
            for key, value, pad in zip(
                keys.flatten(0, 1), values.flatten(0, 1), self._padding, strict=True
            )
        ]
        self.given: Tensor | None = None
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
        self.given = keys
        return keys, values

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of one new token per row; see the class for other calls.

        Raises:
            UnsupportedGenerationError: There are several tokens.
        """
        if key is not self.given:
            return self._own_function(module, query, key, *rest, **kwargs)
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
        chosen, behind, tokens = layer.contents.chosen, layer.behind, layer.tokens
        assert chosen is not None
        assert tokens is not None
        layer.load(self._padded(0, length), self._padded(1, length), chosen, tokens)
        layer.behind, self.start = behind, length

    def _padded(self, which: int, length: int) -> Tensor:
        """Return all keys (0) or values (1), ``[batch, kv_heads, length, dim]``, 0 on padding."""
        heads = [head.read()[which] for head in self._heads]
        whole = heads[0].new_zeros(self._rows, len(heads) // self._rows, length, heads[0].shape[3])
        for into, own, pad in zip(whole.flatten(0, 1), heads, self._padding, strict=True):
            into[pad:] = own[0, 0, : length - pad]
        return whole


class QueryLog:
    """A record of the queries with which a layer's attention function was called.

    `attend` is called in place of the function.

    Args:
        growing: The layer's keys; a call with other keys is not recorded.
        attend: The function that computes attention.
        asked: Number of last queries that the policy's decoding rule looks at; None for all.
    """

    def __init__(self, growing: Growing, attend: Attend, asked: int | None) -> None:
        self._growing, self._attend, self._asked = growing, attend, asked
        # One more than asked for, since the last token may be forgotten.
        self._queries: deque[Tensor] = deque(maxlen=None if asked is None else asked + 1)
        self._count = 0  # since `give`

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Record the queries, and compute attention."""
        if key is self._growing.given:
            # A copy, since attention modules may still write to the tensor that they passed.
            self._queries.append(query.clone())
            self._count += 1
        return self._attend(module, query, key, *rest, **kwargs)

    def give(self, layer: PolicyLayer, count: int, tokens: SeenTokens) -> None:
        """Let the cache's layer remember the queries of the next ``count`` tokens.

        Args:
            layer: The layer.
            count: Number of tokens of which it has not yet been given the queries.
            tokens: The tokens seen up to the last of these.
        """
        ahead = [self._queries.pop() for _ in range(self._count - count)]
        observed = layer.contents.observed
        if len(self._queries) < count:  # those before are not asked for any more
            observed = attrs.evolve(observed, queries=None, columns=None)
        if self._queries:
            queries = torch.cat(tuple(self._queries), dim=2)
            observed = observed.noted(queries, tokens, None, tokens.unbroken)
        if self._asked is not None:
            observed = observed.last(self._asked + 1, tokens, tokens.unbroken)
        layer.contents = attrs.evolve(layer.contents, observed=observed)
        self._count = len(ahead)
        self._queries.clear()
        self._queries.extend(reversed(ahead))
