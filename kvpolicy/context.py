"""`LayerContext`: what one attention layer shows a policy."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count, check_kind
from kvpolicy.errors import ShapeError
from kvpolicy.kinds import TokenKind
from kvpolicy.layer_inputs import (
    NO_DECODING,
    PLAIN_LAYER,
    AttentionSettings,
    DecodingInputs,
    LayerInputs,
)

# The class of each attribute, and whether it may be None.
_KINDS: tuple[tuple[str, type, bool], ...] = (
    *((name, Tensor, False) for name in ("_queries", "keys", "values", "positions", "new_valid")),
    ("_kinds", Tensor, True),
    ("_stored", tuple, True),
    ("_held_len", tuple, True),
    ("seen_len", tuple, False),
    ("attention", AttentionSettings, False),
    ("layer", LayerInputs, False),
    ("decoding", DecodingInputs, False),
)


@attrs.frozen(eq=False, slots=False)
class LayerContext:
    """The inputs for a policy's decision at one attention layer: keys, values, queries, token data.

    The keys are those of all tokens that the layer can attend to, in ascending position: first the
    tokens kept from earlier conversation turns, then the new tokens. Rows and heads that hold
    fewer tokens are padded on the left, so that the last slot is the last token of every row.

    Args:
        layer_idx: Index of the layer, from 0.
        num_layers: Layers of the model.
        queries: ``[batch, query_heads, query_len, head_dim]``, after rotary embedding: the last
            ``query_len`` of the layer's new tokens, as many as the policy asks for. If there are
            none, reading this attribute is an error.
        keys: ``[batch, kv_heads, key_len, head_dim]``, after rotary embedding.
        values: ``[batch, kv_heads, key_len, head_dim]``.
        positions: ``[batch, kv_heads, key_len]`` int64, the token's position in its row; -1 on
            padding.
        new_valid: ``[batch, new_len]`` bool, the layer's new tokens (its last ``new_len`` slots):
            False where a row has fewer.
        seen_len: For each row, the number of tokens of its context so far; rates refer to it.
        attention: How attention turns products of queries and keys into scores.
        layer: The layer's heads, and what is given only to parts that declare that they read it.
        decoding: The scorer's state, and the positions of the queries of an answer.
        kinds: ``[batch, kv_heads, key_len]`` int8, the `TokenKind` of each key's token; values on
            padding are ignored. In a later turn the heads of a row may hold different tokens. None
            if the model reads text only. Read them with `is_kind`.
        stored: The two tensors ``[batch, stored_heads, key_len, width]`` that the layer stores, if
            attention computes the keys and values of more heads from them, as latent attention
            does. Tokens are then kept for all heads together: selectors are shown a single head.
            None if the layer stores keys and values themselves.
        held_len: For each row, the number of tokens that each head holds, if it is the same for all
            heads and known without reading ``positions``, which would wait for the device.
            Otherwise None. Set it to None when you evolve a context to other ``positions``. Read it
            with `kvpolicy.host_counts.held_counts`.

    Attributes:
        batch: The number of rows.
        kv_heads: The number of key/value heads in this context; see `LayerInputs.heads`.
        query_heads: The number of query heads: ``group * kv_heads``.
        key_len: The number of slots of keys, padding included.
        query_len: The number of trailing queries in this context.
        new_len: The number of slots of the layer's new tokens, padding included.

    Raises:
        TypeError: An argument is no tensor, or a tensor has the wrong dtype.
        ShapeError: The axes do not fit together.
        ValueError: ``layer_idx`` lies outside the model.
    """

    layer_idx: int
    num_layers: int
    _queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    new_valid: Tensor
    seen_len: tuple[int, ...]
    attention: AttentionSettings = attrs.field(kw_only=True)
    layer: LayerInputs = attrs.field(default=PLAIN_LAYER, kw_only=True)
    decoding: DecodingInputs = attrs.field(default=NO_DECODING, kw_only=True)
    _kinds: Tensor | None = attrs.field(default=None, kw_only=True)
    _stored: tuple[Tensor, Tensor] | None = attrs.field(default=None, kw_only=True)
    _held_len: tuple[int, ...] | None = attrs.field(default=None, kw_only=True)

    # Sizes, computed once, since parts read them many times at every layer.
    batch: int = attrs.field(init=False)
    kv_heads: int = attrs.field(init=False)
    query_heads: int = attrs.field(init=False)
    key_len: int = attrs.field(init=False)
    query_len: int = attrs.field(init=False)
    new_len: int = attrs.field(init=False)
    # Whether every slot of every head is known to hold a token.
    _unpadded: bool = attrs.field(init=False, repr=False)
    # The counts that selectors have returned, by id; see `known_counts`.
    _counts: dict[int, tuple[int, ...] | None] = attrs.field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        self._check_types()
        if self.keys.ndim != 4 or self._queries.ndim != 4:
            raise ShapeError(
                "keys must be [batch, kv_heads, key_len, head_dim] and queries [batch, "
                f"query_heads, query_len, head_dim], got {list(self.keys.shape)} and "
                f"{list(self._queries.shape)}"
            )
        batch, kv_heads, key_len, head_dim = self.keys.shape
        if self._queries.shape[0] != batch or self._queries.shape[3] != head_dim:
            raise ShapeError(
                "queries and keys must agree in batch and head_dim, got queries "
                f"{list(self._queries.shape)} and keys {list(self.keys.shape)}"
            )
        if not (batch and kv_heads):
            raise ShapeError(
                f"keys must have at least one row and one head, got {list(self.keys.shape)}"
            )
        if self._queries.shape[1] % kv_heads:
            raise ShapeError(
                "query_heads must be a multiple of kv_heads, got "
                f"query_heads={self._queries.shape[1]} and kv_heads={kv_heads}"
            )
        if self.values.shape[:3] != self.keys.shape[:3]:
            raise ShapeError(
                "values must be [batch, kv_heads, key_len, head_dim] as keys "
                f"{list(self.keys.shape)}, got {list(self.values.shape)}"
            )
        if self.positions.shape != (batch, kv_heads, key_len):
            raise ShapeError(
                f"positions must be [batch, kv_heads, key_len] = {[batch, kv_heads, key_len]}, "
                f"got {list(self.positions.shape)}"
            )
        if self._kinds is not None and self._kinds.shape != self.positions.shape:
            raise ShapeError(
                f"kinds must be [batch, kv_heads, key_len] = {list(self.positions.shape)}, got "
                f"{list(self._kinds.shape)}"
            )
        for each in self._stored or ():
            if each.ndim != 4 or (each.shape[0], each.shape[2]) != (batch, key_len):
                raise ShapeError(
                    f"stored must be two tensors [batch, stored_heads, key_len, width] with "
                    f"batch={batch} and key_len={key_len}, got {list(each.shape)}"
                )
        if self.new_valid.ndim != 2 or self.new_valid.shape[0] != batch:
            raise ShapeError(
                f"new_valid must be [batch, new_len] with batch={batch}, got "
                f"{list(self.new_valid.shape)}"
            )
        new_len, query_len = self.new_valid.shape[1], self._queries.shape[2]
        self.__dict__.update(  # the class is frozen to everyone else
            batch=batch,
            kv_heads=kv_heads,
            query_heads=self._queries.shape[1],
            key_len=key_len,
            query_len=query_len,
            new_len=new_len,
            _unpadded=self._held_len is not None and min(self._held_len, default=0) == key_len,
        )
        placed = self.decoding.query_positions is not None
        if not new_len <= key_len or not (placed or query_len <= new_len):
            raise ShapeError(
                "query_len <= new_len <= key_len must hold, got "
                f"{query_len}, {new_len} and {key_len}"
            )
        if len(self.seen_len) != batch:
            raise ShapeError(
                f"seen_len must have one entry per row (batch={batch}), got {self.seen_len}"
            )
        if self._held_len is not None and len(self._held_len) != batch:
            raise ShapeError(
                f"held_len must have one entry per row (batch={batch}), got {self._held_len}"
            )
        for name, dtype in (("positions", torch.int64), ("new_valid", torch.bool)):
            found = getattr(self, name).dtype
            if found != dtype:
                raise TypeError(f"{name} must be {dtype}, got {found}")
        if self.attention.sinks is not None:
            self.attention.check(self.query_heads)
        if self.layer is not PLAIN_LAYER:
            self.layer.check(batch, self.query_heads, new_len, self.values.shape[3])
        if self.decoding is not NO_DECODING:
            self.decoding.check((batch, kv_heads, key_len), query_len)

    def _check_types(self) -> None:
        index, layers = self.layer_idx, self.num_layers
        if not (type(index) is type(layers) is int and 0 <= index < layers):
            check_count("num_layers", layers, minimum=1)
            check_count("layer_idx", index, maximum=layers - 1)
        for name, kind, optional in _KINDS:
            value = getattr(self, name)
            if not isinstance(value, kind) and not (optional and value is None):
                check_kind(name.lstrip("_"), value, kind)

    def _shown(self, **changes: Any) -> LayerContext:
        """Return a copy that shows less, with some attributes replaced; their axes must still fit.

        It is made for every part at every layer, so that nothing is checked again.
        """
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__, _counts={}, **changes)
        return copied

    def _outlined(self) -> LayerContext:
        """Return a copy with token positions and kinds but empty keys, values and queries.

        A policy that chooses for all layers together holds such a context of every layer.
        """

        def outline(tensor: Tensor) -> Tensor:
            return tensor.new_empty(*tensor.shape[:3], 0)

        stored = self._stored
        return attrs.evolve(
            self,
            queries=outline(self._queries[:, :, :0]),
            keys=outline(self.keys),
            values=outline(self.values),
            stored=None if stored is None else (outline(stored[0]), outline(stored[1])),
            layer=LayerInputs(self.layer.heads),
            decoding=NO_DECODING,
        )

    def _for_selector(self) -> LayerContext:
        """Return a copy for selectors, with a single KV head if all heads share stored keys.

        If heads share storage, the one head's keys and values are the stored tensors (several
        stored heads side by side), there are no queries, and the history is averaged over heads.
        """
        if self._stored is None:
            return self
        keys, values = (each.transpose(1, 2).flatten(2)[:, None] for each in self._stored)
        heads, history = self.layer.heads, self.layer.history
        return attrs.evolve(
            self,
            queries=keys.new_empty(self.batch, self.query_heads, 0, keys.shape[3]),
            keys=keys,
            values=values,
            positions=self.positions[:, :1],
            kinds=None if self._kinds is None else self._kinds[:, :1],
            stored=None,
            layer=LayerInputs(history=tuple(heads.mean(each)[:, None] for each in history)),
            decoding=NO_DECODING,
        )

    def _showing(self, num_queries: int | None) -> LayerContext:
        """Return a copy with only the last ``num_queries`` queries; all of them if None."""
        if num_queries is None or num_queries >= self.query_len:
            return self
        first, decoding = self.query_len - num_queries, self.decoding
        places = decoding.query_positions
        if places is not None:
            decoding = DecodingInputs(decoding.state, places[:, first:])
        queries = self._queries[:, :, first:]
        return self._shown(_queries=queries, query_len=num_queries, decoding=decoding)

    def _with_no_more(
        self, *, history_layers: int, rotary: bool, output_weight: bool
    ) -> LayerContext:
        """Return a copy that keeps only the requested history, rotary embedding and weights."""
        layer = self.layer
        if not layer.history and layer.rotary is None and layer.output_weight is None:
            return self
        return self._shown(
            layer=LayerInputs(
                layer.heads,
                layer.rotary if rotary else None,
                layer.output_weight if output_weight else None,
                layer.history[-history_layers:] if history_layers else (),
            )
        )

    @property
    def queries(self) -> Tensor:
        """The context's trailing queries, ``[batch, query_heads, query_len, head_dim]``.

        Raises:
            ShapeError: There are no queries.
        """
        if not self.query_len:
            raise ShapeError(
                "a scorer must declare num_queries to read queries, got a scorer that declares "
                f"none at layer {self.layer_idx}; override num_queries to return how many of the "
                "last queries it reads, or None for all (selectors and propagation policies get "
                "no queries; read them in a scorer)"
            )
        return self._queries

    @property
    def valid(self) -> Tensor:
        """Mask of the keys that are tokens, not padding: bool ``[batch, kv_heads, key_len]``."""
        return self.positions >= 0

    @property
    def query_valid(self) -> Tensor:
        """Mask of the queries that are tokens, not padding: bool ``[batch, query_len]``."""
        if self.decoding.query_positions is not None:
            return self.decoding.query_positions >= 0
        return self.new_valid[:, self.new_len - self.query_len :]

    @property
    def query_places(self) -> Tensor:
        """Each query token's position in the prompt: ``[batch, query_len]``, -1 on padding."""
        if self.decoding.query_positions is not None:
            return self.decoding.query_positions
        last = self.positions[:, 0, self.key_len - self.query_len :]  # new ones: alike in all heads
        return last.masked_fill(~self.query_valid, -1)

    def is_tail(self, size: int) -> Tensor:
        """Mark the last ``size`` tokens of each head: bool ``[batch, kv_heads, key_len]``."""
        tail = torch.arange(self.key_len, device=self.keys.device) >= self.key_len - size
        return tail & self.valid

    def is_new_tail(self, size: int) -> Tensor:
        """Mark the last ``size`` new tokens of each batch row: bool ``[batch, new_len]``."""
        tail = torch.arange(self.new_len, device=self.keys.device) >= self.new_len - size
        return tail & self.new_valid

    def is_first(self, size: int) -> Tensor:
        """Mark tokens at the first ``size`` positions: bool ``[batch, kv_heads, key_len]``.

        Tokens that the layer does not hold are not replaced by later ones.
        """
        return self.valid & (self.positions < size)

    def is_new_first(self, size: int) -> Tensor:
        """Mark new tokens at the context's first ``size`` positions: bool ``[batch, new_len]``."""
        return self.new_valid & (self.positions[:, 0, self.key_len - self.new_len :] < size)

    def is_kind(self, *kinds: TokenKind) -> Tensor:
        """Mark the tokens of the given `TokenKind`s: bool ``[batch, kv_heads, key_len]``.

        All tokens are text where the model reads text only.
        """
        if self._kinds is None:
            return self.valid if TokenKind.TEXT in kinds else torch.zeros_like(self.valid)
        # Not torch.isin, which needs a tensor of them on the device.
        named = (self._kinds == int(kind) for kind in kinds)
        return self.valid & functools.reduce(torch.logical_or, named, torch.zeros_like(self.valid))

    def is_new_kind(self, *kinds: TokenKind) -> Tensor:
        """Mark the new tokens of the given `TokenKind`s: bool ``[batch, new_len]``."""
        return self.new_valid & self.is_kind(*kinds)[:, 0, self.key_len - self.new_len :]
