"""Hold the keys and values of an answer in layers of Transformers, in place of the cache's."""

from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers.model.routing import own_function
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.storage import Plain
from kvpolicy.integrations.transformers.surface import DynamicLayer, StaticLayer


class Lent:
    """A base class for a layer that holds what a layer of a policy cache has lent to it.

    Attributes:
        start: Number of slots of which the cache's layer knows.
    """

    start: int

    @property
    def length(self) -> int:
        """The number of slots per row and head, padding included."""
        raise NotImplementedError

    def give(self, layer: PolicyLayer, length: int) -> None:
        """Let the cache's layer hold the first ``length`` slots."""
        raise NotImplementedError

    def lend(self, layer: PolicyLayer) -> None:
        """Let the cache's layer forget its keys and values, so that they are not held twice."""
        if layer.contents.held is not None:
            layer.contents = attrs.evolve(layer.contents, held=None)


class LentKeys(Lent, DynamicLayer):  # type: ignore[misc]
    """A layer that grows, for rows and heads that hold equally many tokens."""

    def __init__(self, layer: PolicyLayer) -> None:
        super().__init__()
        assert layer.contents.held is not None
        keys, values = layer.contents.held.read()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.start = keys, values, keys.shape[2]
        self.lend(layer)

    @property
    def length(self) -> int:
        """See `Lent.length`."""
        return int(self.keys.shape[2])

    def give(self, layer: PolicyLayer, length: int) -> None:
        """See `Lent.give`."""
        held = Plain.of(self.keys[:, :, :length], self.values[:, :, :length], self.device)
        layer.contents = attrs.evolve(layer.contents, held=held)
        self.start = length


class LentBuffers(Lent, StaticLayer):  # type: ignore[misc]
    """A layer of a fixed size: the cache layer's own buffers, with its room behind the slots."""

    def __init__(self, layer: PolicyLayer) -> None:
        keys, values = layer.claim()
        super().__init__(max_cache_len=keys.shape[2])
        self.start = layer.kept_len
        self.keys, self.values, self.device = keys, values, keys.device
        self.cumulative_length = torch.tensor(self.start, device=keys.device)
        self.is_initialized = True

    @property
    def length(self) -> int:
        """See `Lent.length`."""
        return int(self.cumulative_length)

    def give(self, layer: PolicyLayer, length: int) -> None:
        """See `Lent.give`."""
        held = layer.contents.held
        assert isinstance(held, Plain)
        held = held.written(length - held.length)
        layer.contents = attrs.evolve(layer.contents, held=held)
        self.start = length

    def lend(self, layer: PolicyLayer) -> None:
        """See `Lent.lend`: both hold the same buffers."""


class LentHeads(Lent):
    """A layer that grows, for heads that hold different numbers of tokens.

    Each head of each row has a `DynamicLayer` without padding, so that its attention needs no mask.
    `attend` is called in place of the layer's attention function. It recognises its call by the
    keys that `update` returned, which are only those of the new token.
    """

    def __init__(self, layer: PolicyLayer, module: nn.Module) -> None:
        held, chosen = layer.contents.held, layer.contents.chosen
        assert held is not None
        assert chosen is not None
        keys, values = held.read()
        self._rows, self._own_function = keys.shape[0], own_function(module)
        # Of each head, on the left.
        self._padding: list[int] = (chosen < 0).sum(dim=2).flatten().tolist()
        self._heads = [DynamicLayer() for _ in self._padding]
        pairs = zip(keys.flatten(0, 1), values.flatten(0, 1), strict=True)
        for head, pad, (key, value) in zip(self._heads, self._padding, pairs, strict=True):
            head.update(key[None, None, pad:], value[None, None, pad:])
        self.given: Tensor | None = None
        self.start = keys.shape[2]
        self.lend(layer)

    @property
    def length(self) -> int:
        """See `Lent.length`."""
        return int(self._heads[0].keys.shape[2]) + self._padding[0]

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append one token; return what the layer's attention module gets as keys and values."""
        count, each = keys.shape[2], (len(self._heads), 1, 1)
        new_keys = keys.reshape(*each, count, keys.shape[3]).unbind()
        new_values = values.reshape(*each, count, values.shape[3]).unbind()
        for head, key, value in zip(self._heads, new_keys, new_values, strict=True):
            head.update(key, value)
        self.given = keys
        return keys, values

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of one new token per row; see the class for other calls."""
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
            scaled_dot_product_attention(own, head.keys, head.values, scale=scale)
            for own, head in zip(queries, self._heads, strict=True)
        ]
        return torch.cat(outputs, dim=2).view(self._rows, 1, query.shape[1], -1), None

    def give(self, layer: PolicyLayer, length: int) -> None:
        """See `Lent.give`."""
        chosen, behind, tokens = layer.contents.chosen, layer.behind, layer.tokens
        assert chosen is not None
        assert tokens is not None
        keys, values = (self._padded(name, length) for name in ("keys", "values"))
        layer.load(keys, values, chosen, tokens)
        layer.behind, self.start = behind, length

    def _padded(self, name: str, length: int) -> Tensor:
        """Return all keys or values, ``[batch, kv_heads, length, dim]``, 0 on padding."""
        heads = [getattr(head, name) for head in self._heads]
        whole: Tensor = heads[0].new_zeros(
            self._rows, len(heads) // self._rows, length, heads[0].shape[3]
        )
        for into, own, pad in zip(whole.flatten(0, 1), heads, self._padding, strict=True):
            into[pad:] = own[0, 0, : length - pad]
        return whole
