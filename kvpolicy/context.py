"""`LayerContext`: what one attention layer shows a policy."""

from __future__ import annotations

import functools

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count, check_kind
from kvpolicy.errors import ShapeError
from kvpolicy.heads import Heads
from kvpolicy.kinds import TokenKind
from kvpolicy.renamed import Renamed
from kvpolicy.rotary import RotaryEmbedding

_SIZES = ("batch", "kv_heads", "query_heads", "key_len", "query_len", "new_len")


@attrs.frozen(eq=False)
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
        scaling: Factor on the product of query and key before the softmax.
        heads: Says whether all of the layer's heads are in ``keys``, as they are unless the model
            is tensor-parallel. Parts use its methods for what they compute over all heads.
        softcap: The scaled product ``x`` becomes ``softcap * tanh(x / softcap)``; None if the model
            has no such bound.
        sinks: ``[query_heads]``, an extra logit in each head's softmax, as in GPT-OSS; None if the
            model has none.
        kinds: ``[batch, kv_heads, key_len]`` int8, the `TokenKind` of each key's token; values on
            padding are ignored. In a later turn the heads of a row may hold different tokens. None
            if the model reads text only.
        stored: The two tensors ``[batch, stored_heads, key_len, width]`` that the layer stores, if
            attention computes the keys and values of more heads from them, as latent attention
            does. Tokens are then kept for all heads together; see `for_selector`. None if the layer
            stores keys and values themselves.
        query_positions: ``[batch, query_len]`` int64, the position of each query's token, -1 on
            padding; given while decoding, where some of these tokens may have been evicted. None if
            the queries belong to the last slots.
        state: float32 ``[batch, kv_heads, key_len, state_size]``, the scorer's state for each key
            after the previous choice, 0 on new keys; None if the scorer keeps no state, or has
            none yet. See `Scorer.update`.
        history: float32 ``[batch, heads, new_len]`` each, what the policy's scorer gave this
            layer's new tokens at earlier layers, the nearest layer last; values on padding are
            ignored. The number is the largest `Part.history_layers` of the parts, or fewer at the
            first layers. Layers at which nothing is chosen (sliding windows, recurrences) have no
            entry.
        rotary: The layer's rotary embedding, if a part declares `Part.needs_rotary`.
        output_weight: ``[query_heads, value_dim, hidden]``, the weights of the layer's output
            projection by head, if a part declares `Part.needs_output_weight`.
        held_len: For each row, the number of tokens that each head holds, if it is the same for all
            heads and known without reading ``positions``, which would wait for the device; see
            `KVSelector.kept_counts`. Otherwise None. Set it to None when you evolve a context to
            other ``positions``.

    Attributes:
        batch: The number of rows.
        kv_heads: The number of key/value heads in this context; see `heads`.
        query_heads: The number of query heads: ``group * kv_heads``.
        key_len: The number of slots of keys, padding included.
        query_len: The number of trailing queries in this context.
        new_len: The number of slots of the layer's new tokens, padding included.
        unpadded: Whether every slot of every head is known to hold a token.

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
    scaling: float
    heads: Heads = attrs.field(factory=Heads)
    softcap: float | None = None
    sinks: Tensor | None = None
    kinds: Tensor | None = None
    stored: tuple[Tensor, Tensor] | None = None
    query_positions: Tensor | None = None
    state: Tensor | None = None
    history: tuple[Tensor, ...] = ()
    rotary: RotaryEmbedding | None = None
    output_weight: Tensor | None = None
    held_len: tuple[int, ...] | None = None

    # Sizes, worked out once: parts ask for them many times at every layer.
    batch: int = attrs.field(init=False)
    kv_heads: int = attrs.field(init=False)
    query_heads: int = attrs.field(init=False)
    key_len: int = attrs.field(init=False)
    query_len: int = attrs.field(init=False)
    new_len: int = attrs.field(init=False)
    unpadded: bool = attrs.field(init=False)
    # What selectors have said of their counts, by id; see `known_counts`.
    _counts: dict[int, tuple[int, ...] | None] = attrs.field(init=False, factory=dict, repr=False)

    carried = Renamed("state")

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
        if self.kinds is not None and self.kinds.shape != self.positions.shape:
            raise ShapeError(
                f"kinds must be [batch, kv_heads, key_len] = {list(self.positions.shape)}, got "
                f"{list(self.kinds.shape)}"
            )
        for each in self.stored or ():
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
        sizes = batch, kv_heads, self._queries.shape[1], key_len, self._queries.shape[2]
        for name, size in zip(_SIZES, (*sizes, self.new_valid.shape[1]), strict=True):
            object.__setattr__(self, name, size)  # the class is frozen to everyone else
        unpadded = self.held_len is not None and min(self.held_len, default=0) == key_len
        object.__setattr__(self, "unpadded", unpadded)
        placed = self.query_positions
        if not self.new_len <= key_len or (placed is None and self.query_len > self.new_len):
            raise ShapeError(
                "query_len <= new_len <= key_len must hold, got "
                f"{self.query_len}, {self.new_len} and {key_len}"
            )
        if placed is not None and placed.shape != (batch, self.query_len):
            raise ShapeError(
                f"query_positions must be [batch, query_len] = {[batch, self.query_len]}, got "
                f"{list(placed.shape)}"
            )
        if self.state is not None and self.state.shape[:3] != (batch, kv_heads, key_len):
            raise ShapeError(
                f"state must be [batch, kv_heads, key_len, state_size] with "
                f"{[batch, kv_heads, key_len]}, got {list(self.state.shape)}"
            )
        if self.sinks is not None and self.sinks.shape != (self.query_heads,):
            raise ShapeError(
                f"sinks must be [query_heads] = [{self.query_heads}], got {list(self.sinks.shape)}"
            )
        for each in self.history:
            if each.ndim != 3 or (each.shape[0], each.shape[2]) != (batch, self.new_len):
                raise ShapeError(
                    f"history must hold tensors [batch, heads, new_len] with batch={batch} and "
                    f"new_len={self.new_len}, got {list(each.shape)}"
                )
        weight, value_dim = self.output_weight, self.values.shape[3]
        if weight is not None and (
            weight.ndim != 3 or weight.shape[:2] != (self.query_heads, value_dim)
        ):
            raise ShapeError(
                f"output_weight must be [query_heads, value_dim, hidden] = [{self.query_heads}, "
                f"{value_dim}, hidden], got {list(weight.shape)}"
            )
        if len(self.seen_len) != batch:
            raise ShapeError(
                f"seen_len must have one entry per row (batch={batch}), got {self.seen_len}"
            )
        if self.held_len is not None and len(self.held_len) != batch:
            raise ShapeError(
                f"held_len must have one entry per row (batch={batch}), got {self.held_len}"
            )
        for name, dtype in (("positions", torch.int64), ("new_valid", torch.bool)):
            found = getattr(self, name).dtype
            if found != dtype:
                raise TypeError(f"{name} must be {dtype}, got {found}")

    def _check_types(self) -> None:
        own = (self._queries, self.keys, self.values, self.positions, self.new_valid)
        maybe = (self.sinks, self.kinds, self.query_positions, self.state, self.output_weight)
        tuples = (self.history, self.seen_len, self.stored or (), self.held_len or ())
        right = (
            type(self.layer_idx) is type(self.num_layers) is int
            and 0 <= self.layer_idx < self.num_layers
            and isinstance(self.heads, Heads)
            and all(isinstance(each, Tensor) for each in own)
            and all(each is None or isinstance(each, Tensor) for each in maybe)
            and all(isinstance(each, tuple) for each in tuples)
        )
        if not right:
            self._refuse_types()

    def _refuse_types(self) -> None:
        """Raise TypeError or ValueError if a constructor argument has a wrong type or range."""
        check_count("num_layers", self.num_layers, minimum=1)
        check_count("layer_idx", self.layer_idx, maximum=self.num_layers - 1)
        for name in ("_queries", "keys", "values", "positions", "new_valid"):
            check_kind(name.lstrip("_"), getattr(self, name), Tensor)
        for name in ("sinks", "kinds", "query_positions", "state", "output_weight"):
            if getattr(self, name) is not None:
                check_kind(name, getattr(self, name), Tensor)
        for name in ("stored", "held_len"):
            if getattr(self, name) is not None:
                check_kind(name, getattr(self, name), tuple)
        check_kind("history", self.history, tuple)
        check_kind("seen_len", self.seen_len, tuple)
        check_kind("heads", self.heads, Heads)

    def outlined(self) -> LayerContext:
        """Return a copy with token positions and kinds but empty keys, values and queries.

        A policy that chooses for all layers together holds such a context of every layer.
        """

        def outline(tensor: Tensor) -> Tensor:
            return tensor.new_empty(*tensor.shape[:3], 0)

        stored = None if self.stored is None else (outline(self.stored[0]), outline(self.stored[1]))
        return attrs.evolve(
            self,
            queries=outline(self._queries[:, :, :0]),
            keys=outline(self.keys),
            values=outline(self.values),
            stored=stored,
            query_positions=None,
            state=None,
            history=(),
            rotary=None,
            output_weight=None,
        )

    def for_selector(self) -> LayerContext:
        """Return a copy for selectors, with a single KV head if all heads share stored keys.

        If heads share storage, the one head's keys and values are the stored tensors (several
        stored heads side by side), there are no queries, and the history is averaged over heads.
        """
        if self.stored is None:
            return self
        keys, values = (each.transpose(1, 2).flatten(2)[:, None] for each in self.stored)
        return attrs.evolve(
            self,
            queries=keys.new_empty(self.batch, self.query_heads, 0, keys.shape[3]),
            keys=keys,
            values=values,
            positions=self.positions[:, :1],
            kinds=None if self.kinds is None else self.kinds[:, :1],
            heads=Heads(),
            stored=None,
            query_positions=None,
            state=None,
            history=tuple(self.heads.mean(each)[:, None] for each in self.history),
            rotary=None,
            output_weight=None,
        )

    def showing(self, num_queries: int | None) -> LayerContext:
        """Return a copy with only the last ``num_queries`` queries; all of them if None.

        Args:
            num_queries: See `Scorer.num_queries`.
        """
        if num_queries is None or num_queries >= self.query_len:
            return self
        first, places = self.query_len - num_queries, self.query_positions
        return attrs.evolve(
            self,
            queries=self._queries[:, :, first:],
            query_positions=None if places is None else places[:, first:],
        )

    def with_no_more(
        self, *, history_layers: int, rotary: bool, output_weight: bool
    ) -> LayerContext:
        """Return a copy that keeps only the requested history, rotary embedding and output weights.

        Args:
            history_layers: See `Part.history_layers`.
            rotary: See `Part.needs_rotary`.
            output_weight: See `Part.needs_output_weight`.
        """
        return attrs.evolve(
            self,
            history=self.history[-history_layers:] if history_layers else (),
            rotary=self.rotary if rotary else None,
            output_weight=self.output_weight if output_weight else None,
        )

    @property
    def queries(self) -> Tensor:
        """The context's trailing queries, ``[batch, query_heads, query_len, head_dim]``.

        Raises:
            ShapeError: There are no queries.
        """
        if not self.query_len:
            raise ShapeError(
                "a scorer must declare num_queries to look at queries, since it is shown none "
                f"otherwise, got none of layer {self.layer_idx}; override num_queries to return "
                "how many of the last ones it looks at, or None for all (a selector or a "
                "propagation policy has none of its own; let a scorer look)"
            )
        return self._queries

    @property
    def valid(self) -> Tensor:
        """Mask of the keys that are tokens, not padding: bool ``[batch, kv_heads, key_len]``."""
        return self.positions >= 0

    @property
    def query_valid(self) -> Tensor:
        """Mask of the queries that are tokens, not padding: bool ``[batch, query_len]``."""
        if self.query_positions is not None:
            return self.query_positions >= 0
        return self.new_valid[:, self.new_len - self.query_len :]

    @property
    def query_places(self) -> Tensor:
        """Each query token's position in the prompt: ``[batch, query_len]``, -1 on padding."""
        if self.query_positions is not None:
            return self.query_positions
        last = self.positions[:, 0, self.key_len - self.query_len :]  # new tokens: as in all heads
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
        if self.kinds is None:
            return self.valid if TokenKind.TEXT in kinds else torch.zeros_like(self.valid)
        # Not torch.isin, which needs a tensor of them on the device.
        named = (self.kinds == int(kind) for kind in kinds)
        return self.valid & functools.reduce(torch.logical_or, named, torch.zeros_like(self.valid))

    def is_new_kind(self, *kinds: TokenKind) -> Tensor:
        """Mark the new tokens of the given `TokenKind`s: bool ``[batch, new_len]``."""
        return self.new_valid & self.is_kind(*kinds)[:, 0, self.key_len - self.new_len :]
