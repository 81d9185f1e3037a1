"""What a layer chooses among, where it holds more than the tokens of a first prompt."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.context import LayerContext
from kvpolicy.decoding import DecodingEviction
from kvpolicy.integrations.transformers.model.masks import FLASH, first_seen
from kvpolicy.integrations.transformers.model.rotary import LayerRotary
from kvpolicy.integrations.transformers.model.routing import Scores
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.observed import Observed
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.selection import compress, gather_positions, gather_slots


@attrs.frozen(eq=False)
class Near:
    """What a sliding layer keeps: all that the next token's window will see.

    The window is bound enough for the policy not to choose there; in rows that are shorter than it,
    which it does not bound, the policy does.

    Args:
        near: ``[batch, kv_heads or 1, key_len]`` bool, what the window will see.
        short: ``[batch, 1, 1]`` bool, rows for which the policy chooses.
        leaves_short_rows: Whether there are any.
        counts: For each row, the tokens of each head that the window will see, where that is known
            without looking; None where it is not.
    """

    near: Tensor
    short: Tensor
    leaves_short_rows: bool
    counts: tuple[int, ...] | None = None

    @staticmethod
    def of(
        positions: Tensor,
        lengths: Tensor,
        window: int,
        implementation: str,
        *,
        seen_len: tuple[int, ...] | None = None,
        held_len: tuple[int, ...] | None = None,
    ) -> Near:
        """Measure a layer's keys.

        Args:
            positions: ``[batch, kv_heads or 1, key_len]`` int64, -1 on padding.
            lengths: ``[batch]``, tokens of each row.
            window: The layer's.
            implementation: The model's attention implementation.
            seen_len: ``lengths`` as numbers; None where they are not known.
            held_len: See `LayerContext.held_len`.
        """
        lengths = lengths.to(positions.device)[:, None, None]
        short = lengths <= window
        near = (positions >= 0) & (positions >= first_seen(lengths, window))
        counts = None
        if held_len is not None and held_len == seen_len:  # all tokens up to the last
            counts = tuple(seen - max(first_seen(seen, window), 0) for seen in seen_len)
        if implementation in FLASH:
            return Near(near, short, leaves_short_rows=False, counts=counts)
        shorter = bool(short.any()) if seen_len is None else min(seen_len) <= window
        return Near(near, short, shorter, counts)

    def kept(self, chosen: Tensor | None) -> Tensor:
        """Indices ``[batch, kv_heads or 1, kept_len]``, with ``chosen`` those of the short rows."""
        most = int(self.near.sum(dim=-1).max()) if self.counts is None else max(self.counts)
        kept = compress(self.near, most)
        if chosen is None:
            return kept
        longest = max(kept.shape[2], chosen.shape[2])
        kept, chosen = (
            pad(each, (longest - each.shape[2], 0), value=-1) for each in (kept, chosen)
        )
        kept = torch.where(self.short, chosen, kept)
        return kept[:, :, int((kept < 0).all(dim=0).all(dim=0).sum()) :]


def carried_for(observed: Observed, context: LayerContext, carries: int) -> Tensor:
    """What is carried for each key ``[batch, kv_heads, key_len, carries]``, 0 for those since.

    Args:
        observed: What the layer remembers.
        context: The layer's keys, in the order in which it holds them.
        carries: Numbers for each key.
    """
    held = observed.carried
    if held is None:
        shape = (context.batch, context.kv_heads, context.key_len, carries)
        return torch.zeros(shape, dtype=torch.float32, device=context.keys.device)
    return pad(held, (0, 0, 0, context.key_len - held.shape[2]))


@attrs.frozen(eq=False)
class Held:
    """All that a layer holds while an answer is decoded, for it to choose anew.

    Args:
        layer: The layer.
        index: Its index.
        num_layers: Layers of the model.
        keys: ``[batch, kv_heads, key_len, head_dim]``, as attention gets them.
        values: Likewise.
        stored: What is held, where attention makes more heads of it; else keys and values.
        positions: ``[batch, kv_heads or 1, key_len]`` int64 of what is stored, -1 on padding.
        scores: How scores are made of products.
        tokens: Those seen, of which the last count as appended.
    """

    layer: PolicyLayer
    index: int
    num_layers: int
    keys: Tensor
    values: Tensor
    stored: tuple[Tensor, Tensor]
    positions: Tensor
    scores: Scores
    tokens: SeenTokens

    def choose(
        self,
        decoding: DecodingEviction,
        window: int | None,
        implementation: str,
        follows: Tensor | None = None,
    ) -> Chosen:
        """Let the layer choose.

        Args:
            decoding: The rule.
            window: The layer's sliding window, if it is shorter than the context.
            implementation: The model's attention implementation.
            follows: ``[batch, 1, kept_len]`` int64, the choice of an earlier layer that holds the
                same tokens, which this one keeps as well; None where it chooses by itself.
        """
        held, order = self._padding_first()
        if follows is not None:
            kept, carried = follows.to(held.positions.device), None
            if decoding.carries:
                carried = decoding.carry(held._context(decoding, order))
        elif window is None:
            kept, carried = decoding.decide(held._context(decoding, order))
        else:
            near = Near.of(held.positions, held.tokens.lengths, window, implementation)
            chosen = carried = None
            if near.leaves_short_rows:
                chosen, carried = decoding.decide(held._context(decoding, order))
            kept = near.kept(chosen)
        # Queries that the next choice may look at, if fewer tokens than it asks for come before.
        asked, tokens = decoding.num_queries, self.tokens
        if not asked or (asked <= decoding.every and not tokens.padded):
            return Chosen(held, order, kept, carried, None)
        again = self.layer.observed.last(asked, tokens, tokens.unbroken)
        return Chosen(held, order, kept, carried, again)

    def _padding_first(self) -> tuple[Held, Tensor | None]:
        """With padding on the left, as rows may have some among an answer's columns."""
        if not (self.tokens.padded or self.layer.padded):
            return self, None
        order = (self.positions >= 0).to(torch.uint8).argsort(dim=2, stable=True)
        ordered = attrs.evolve(
            self,
            keys=gather_slots(self.keys, order),
            values=gather_slots(self.values, order),
            stored=(gather_slots(self.stored[0], order), gather_slots(self.stored[1], order)),
            positions=gather_positions(self.positions, order),
        )
        return ordered, order

    def _context(self, decoding: DecodingEviction, order: Tensor | None) -> LayerContext:
        device, layer, tokens = self.keys.device, self.layer, self.tokens
        observed, kv_heads = layer.observed, self.keys.shape[1]
        new = (tokens.appended >= 0).sum(dim=1)[:, None]
        count = min(tokens.appended.shape[1], self.keys.shape[2])
        slots = torch.arange(count, device=new.device)
        positions = self.positions.expand(-1, kv_heads, -1)
        held_as_shown = self.stored[0].shape[1] == kv_heads
        places = None
        if observed.count and decoding.num_queries != 0:
            queries, places = observed.shown(tokens)
        else:
            batch, _, _, head_dim = self.keys.shape
            queries = self.keys.new_empty(batch, layer.query_heads, 0, head_dim)
        context = LayerContext(
            layer_idx=self.index,
            num_layers=self.num_layers,
            queries=queries,
            keys=self.keys,
            values=self.values,
            stored=None if held_as_shown and not layer.one_choice else self.stored,
            positions=positions,
            kinds=tokens.kinds_at(positions),
            new_valid=(slots >= count - new).to(device),
            seen_len=tuple(tokens.lengths.tolist()),
            scaling=self.scores.scaling,
            softcap=self.scores.softcap,
            sinks=self.scores.sinks,
            heads=layer.spread.heads(layer.query_heads),
            query_positions=places,
            rotary=self._rotary() if decoding.needs_rotary else None,
            output_weight=layer.weight(self.values) if decoding.needs_output_weight else None,
        ).showing(decoding.num_queries)
        if not decoding.carries:
            return context
        carried = carried_for(observed, context, decoding.carries)
        return attrs.evolve(
            context, carried=carried if order is None else gather_slots(carried, order)
        )

    def _rotary(self) -> LayerRotary:
        assert self.layer.turns is not None
        return LayerRotary(self.layer.turns)


@attrs.frozen(eq=False)
class Chosen:
    """What a layer keeps of all it holds.

    Args:
        held: What it holds, padding on the left.
        order: ``[batch, kv_heads or 1, key_len]`` int64, the slot in each place of that; None where
            they stand as the layer has them.
        indices: ``[batch, kv_heads or 1, kept_len]``, of what is kept.
        carried: What its scorer carries for each key; None for nothing.
        observed: The queries that are still to be looked at; None for none.
    """

    held: Held
    order: Tensor | None
    indices: Tensor
    carried: Tensor | None
    observed: Observed | None

    def store(self, *, room: int | None = None) -> None:
        """Let the layer hold it, with memory for ``room`` more; the layer's own if None."""
        layer, positions = self.held.layer, self.held.positions
        if isinstance(layer, IndexedLayer):
            layer.show_held(self.order)
        layer.store(*self.held.stored, positions, self.indices, self.carried, room=room)
        if self.observed is not None:
            layer.observed = attrs.evolve(self.observed, carried=layer.observed.carried)
