"""Prepare the arguments of each layer in a pass, and compute its attention."""

from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.blocks import Narrowed
from kvpolicy.integrations.transformers.forward.facts import Call
from kvpolicy.integrations.transformers.forward.inputs import take_columns
from kvpolicy.integrations.transformers.forward.packed_attention import packed_attention
from kvpolicy.integrations.transformers.forward.passes import KeyUse, Pass, PassState
from kvpolicy.integrations.transformers.model.mask_arguments import MaskArguments
from kvpolicy.integrations.transformers.model.masks import FLASH, Mask, Spans
from kvpolicy.integrations.transformers.model.routing import Attend, AttentionInputs, is_plain
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.packed import Packed
from kvpolicy.integrations.transformers.surface import DISTANCES


@attrs.frozen(eq=False)
class _SharedKeys:
    """The positions of keys that later layers reuse, and what their own layer sees of them.

    Args:
        keys: ``[batch, 1 or kv_heads, key_len]`` int64 original positions, -1 on padding.
        queries: ``[batch, query_len]`` int64, those of the tokens that reach their own layer.
        own: What they see by the model's own mask; None if this is causal.
    """

    keys: Tensor
    queries: Tensor
    mask: Mask
    own: Spans | None
    layer: PolicyLayer


@attrs.frozen(eq=False)
class Columns:
    """A record of the input columns that the cache reports to an attention module.

    Some modules, or their model for them, ask for the columns of queries and keys, count on from
    there without gaps, and give their attention function a bias for every pair. Evicted tokens
    leave gaps. So keys are said to be in all columns seen, from 0 on, and of the bias the entries
    of the keys that are held are taken, head by head. Rows may have different gaps, but a module
    takes one column for the queries of all rows: the largest one of any row. Scorers do not see the
    bias, and restarts are refused.

    Args:
        keys: Number of columns seen, the new ones included.
        queries: ``[query_len]`` int64, each below ``keys``.
    """

    keys: int
    queries: Tensor

    @property
    def query_offset(self) -> Tensor:
        """The numbers to add to 0, 1, ... to get the columns of the queries: ``[query_len]``."""
        return self.queries - torch.arange(len(self.queries), device=self.queries.device)

    @property
    def distances(self) -> Tensor:
        """The columns from each key to each query: ``[query_len, keys]``."""
        return self.queries[:, None] - torch.arange(self.keys, device=self.queries.device)

    def taken(
        self, arguments: dict[str, Any], queries: Tensor, keys: Tensor, query_heads: int
    ) -> dict[str, Any]:
        """Cut the biases for query-key pairs in attention arguments to the keys in the cache.

        ``queries`` and ``keys`` are original positions, -1 on padding.
        """
        distances = queries[:, None, :, None] - keys[:, :, None, :]
        columns = self.queries.to(keys.device)[:, None] - distances
        columns = columns.clamp(0, self.keys - 1)
        columns = columns.repeat_interleave(query_heads // columns.shape[1], dim=1)
        pairs = (len(self.queries), self.keys)
        return {
            name: each.gather(-1, columns.expand(*each.shape[:2], -1, -1))
            if isinstance(each, Tensor) and each.ndim == 4 and each.shape[2:] == pairs
            else each
            for name, each in arguments.items()
        }


class LayerAttention:
    """Prepares the arguments of one layer at a time, and then computes the layer's attention.

    Attributes:
        inside: Index of the layer whose attention runs; None before the first.
        packed: Whether the layer must still attend to packed keys.
        places: The positions at which it reads its tokens.
        narrowed: Its second run, for some of its tokens; None if it runs once.
        told: The columns that the cache has given its attention for keys and queries; None if its
            attention has not asked.
        told_or_masked: The layers that were given a mask, or have asked for these columns.
        plain: The layers that hold padding, and whose attention is a plain softmax over the keys
            that the cache gave.
    """

    def __init__(self, call: Call, made: Pass, at: PassState) -> None:
        self._call, self._made, self._at = call, made, at
        self.layers = at.layers
        self._reach, self._masks = at.reach, at.masks
        self._appends = made.at_queries.keys is KeyUse.APPEND
        self.inside: int | None = None
        self.packed = False
        self.places = at.reach.positions
        self.narrowed: Narrowed | None = None
        self.told: Columns | None = None
        self.told_or_masked: set[int] = set()
        self.plain: set[int] = set()
        self._shared: dict[int, _SharedKeys] = {}
        self._padding_of: tuple[Tensor, Tensor | None] | None = None

    def arguments(
        self, index: int, layer: PolicyLayer, hidden: Tensor, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments to call a layer with, for only the tokens that reach it."""
        if layer.producer is not None:
            return self._for_borrower(index, layer.producer, hidden, kwargs)
        if layer.recurrent is None:
            if layer.attends:
                return self._for_attention(index, layer, hidden, kwargs)
            return self._reach.arguments(kwargs)
        layer.recurrent.own_states()
        if not layer.attends:
            return self._for_state(hidden, self._reach.arguments(kwargs))
        names = MaskArguments.of(kwargs)
        here = self._for_attention(index, layer, hidden, names.taken(kwargs))
        return names.given(here, self._padding(hidden))

    def _for_attention(
        self, index: int, layer: PolicyLayer, hidden: Tensor, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments to call an attending layer with, its mask included."""
        masks = self._masks
        self.inside, self.told = index, None
        self.packed = (
            self._appends and isinstance(layer.contents.held, Packed) and masks.enter_packed(index)
        )
        told = None if kwargs.get(DISTANCES) is None else self.columns(index)
        here = kwargs if self._reach.slots is None else self._reach.arguments(kwargs)
        if told is not None:
            here = {**here, DISTANCES: told.distances.to(kwargs[DISTANCES].device)}
        self.note_places(here)
        if self.packed:  # needs no mask, and no positions to make one
            return {**here, "attention_mask": None}
        attended = self._call.attended
        if attended is not None and not (self._at.first and self._made.incoming.order is None):
            masks.enter(layer)
            heads = 1 if layer.held is None else layer.held.shape[1]
            attended.positions[index] = masks.positions(layer, heads, hidden.device)
        if layer.indexed is not None:
            return self._for_indexer(index, layer.indexed, hidden, here)
        here = masks.arguments(index, hidden, here)
        if kwargs.get("attention_mask") is not None or here.get("attention_mask") is not None:
            self.told_or_masked.add(index)
        if index in masks.lenders:
            keys = masks.positions(layer, layer.choices, hidden.device)
            places, mask = self._reach.positions, here.get("attention_mask")
            self._shared[index] = _SharedKeys(keys, places, mask, masks.own(kwargs), layer)
        return here

    def _for_indexer(
        self, index: int, layer: IndexedLayer, hidden: Tensor, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of a layer with an indexer that reads masks and positions itself."""
        own, masks, batch = kwargs.get("attention_mask"), self._masks, hidden.shape[0]
        if isinstance(own, Tensor) and own.ndim == 2:  # of tokens, from which it makes its own
            masks.enter(layer)
            kwargs = {**kwargs, "attention_mask": self._reach.valid.to(hidden.device)}
        else:
            kwargs = masks.arguments(index, hidden, kwargs)
            mask = kwargs["attention_mask"]
            mask = masks.mask(index, hidden) if mask is None else mask
            assert isinstance(mask, Tensor)
            kwargs = {**kwargs, "attention_mask": mask.expand(batch, -1, -1, -1)}
        if layer.blocks:  # blocks are counted by slot
            slots = torch.arange(hidden.shape[1], device=hidden.device) + layer.kept_len
            kwargs = {**kwargs, "position_ids": slots.expand(batch, -1)}
        places = layer.places()
        if places is None:
            return kwargs
        # Index keys are rotated late, those held by the decoder's rotary embedding.
        held, new = self._call.model.rotary(hidden, places), kwargs["position_embeddings"]
        turns = tuple(torch.cat(pair, dim=1) for pair in zip(held, new, strict=True))
        if masks.order is not None:
            turns = tuple(take_columns(each, masks.order[:, 0]) for each in turns)
        return {**kwargs, "position_embeddings": turns}

    def _for_borrower(
        self, index: int, producer: int, hidden: Tensor, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments to call a layer with that attends to another layer's keys."""
        shared = self._shared[producer]
        if self._call.attended is not None:
            self._call.attended.positions[index] = shared.keys
        here, implementation = self._reach.arguments(kwargs), self._call.implementation
        if implementation in FLASH and "position_ids" in here:
            here = {**here, "position_ids": None}  # see `attend`, which it does not come to
        mask, count = shared.mask, hidden.shape[self._reach.token_axis(hidden)]
        if shared.queries is not self._reach.positions or count != shared.queries.shape[1]:
            # Tokens were dropped in between, or the decoder continues with the last tokens only.
            heads, window = shared.layer.facts.query_heads, self._masks.windows[index]
            seen = self._masks.visibility(
                shared.keys.to(hidden.device), heads, window, shared.own, count
            )
            mask = seen.mask(implementation, hidden.dtype)
        return {**here, "attention_mask": mask}

    def _for_state(self, hidden: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments to call a recurrent layer with, its padding mask included."""
        valid = self._padding(hidden)
        # The convolutions of a layer may have a name of their own for this mask.
        own = dict.fromkeys({"conv_mask"} & kwargs.keys(), valid)
        return {**kwargs, **own, "attention_mask": valid}

    def _padding(self, hidden: Tensor) -> Tensor | None:
        """Return the mask ``[batch, len]`` of a recurrent layer's tokens; None without padding."""
        valid = self._reach.valid
        if not self._reach.padded:
            return None
        if self._padding_of is None or self._padding_of[0] is not valid:  # once for equal layers
            check_states_skip_nothing(valid, self._at.started)
            self._padding_of = valid, None if bool(valid.all()) else valid
        found = self._padding_of[1]
        return None if found is None else found.to(hidden.device).long()

    def note_places(self, kwargs: dict[str, Any]) -> None:
        """Remember the position ids that a layer is called with, or else the original positions."""
        given = kwargs.get("position_ids")
        usable = isinstance(given, Tensor) and given.ndim == 2
        self.places = given if isinstance(given, Tensor) and usable else self._reach.positions

    def columns(self, index: int) -> Columns | None:
        """Return the input columns to report to an attention module that asks for them.

        None means that the columns held are right, before anything was dropped or evicted.
        """
        made, at, reach = self._made, self._at, self._reach
        if self.inside != index:
            return None
        first = at.first and reach.slots is None
        if made.no_columns:
            raise UnsupportedModelError(made.no_columns.format(index=index))
        if first:
            return None
        if made.stage is not None:
            raise UnsupportedModelError(
                "a prompt must come in one forward if attention counts columns, as in layer "
                f"{index}, and {at.policy} drops tokens; leave prefill_chunk_size at None"
            )
        count = at.before.seen + reach.count
        if reach.slots is None:
            queries = torch.arange(at.before.seen, count, device=reach.positions.device)
        else:
            queries = reach.positions.amax(dim=0)
        self.told = Columns(count, queries)
        self.told_or_masked.add(index)
        return self.told

    def attend(
        self,
        attend: Attend,
        module: nn.Module,
        inputs: AttentionInputs,
        mask: Any,
        given: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a layer's attention, by the module's own function or by an equal, faster way."""
        query, key, value = inputs.queries, inputs.keys, inputs.values
        if self.narrowed is not None:
            return self.narrowed.attend(attend, module, query, **kwargs), None
        masks, reach, inside = self._masks, self._reach, self.inside
        assert inside is not None
        layer = self.layers[inside]
        blocks, masks.blocks = masks.blocks, None
        if blocks is not None and self.told is None:
            return blocks.attend(attend, module, query, key, value, **kwargs), None
        if blocks is not None:  # the module adds a bias that it made for all keys
            mask = masks.mask(inside, query)
        plain = key is given[0] and value is given[1] and layer.contents.padded
        plain = plain and reach.count == 1 and is_plain(attend, kwargs)
        if plain:
            self.plain.add(inside)
        if self.packed:
            self.packed = False
            held = layer.held
            if plain:
                assert isinstance(held, Packed)
                return packed_attention(query, held, kwargs.get("scaling")), None
            masks.enter(layer)
            mask = masks.mask(inside, query)
        if self._call.implementation in FLASH:
            # From positions with gaps, flash attention would infer several sequences in one row.
            kwargs.pop("position_ids", None)
        if self.told is not None:
            keys = masks.positions(layer, layer.choices, query.device)
            places = reach.positions.to(query.device)
            kwargs = self.told.taken(kwargs, places, keys, query.shape[1])
        return attend(module, query, key, value, mask, **kwargs)


def check_states_skip_nothing(valid: Tensor, started: Tensor) -> None:
    """Check that no recurrent layer would read padding after a row's tokens.

    A row that passes on fewer tokens than another, or restarts with fewer, is padded before them.
    Only rows in which tokens were read before, the ``started`` ones, then skip padding.
    """
    between = started.to(valid.device) & ~valid.all(dim=1)
    if bool(between.any()):
        row = int(between.nonzero()[0])
        counts = valid.sum(dim=1).tolist()
        raise UnsupportedModelError(
            "all rows of a later turn must pass on equally many tokens if later layers are "
            f"recurrent, since a state cannot skip padding, but row {row} passes on {counts[row]} "
            f"of up to {max(counts)}; give budgets in tokens, rows of equal length in all, or "
            "read rows one at a time"
        )
