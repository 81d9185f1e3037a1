"""Choose among the tokens that a layer holds, during an answer or under a sliding window."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.context import LayerContext
from kvpolicy.decoding import DecodingEviction
from kvpolicy.host_counts import on_device
from kvpolicy.integrations.transformers.forward.layer_contexts import layer_context
from kvpolicy.integrations.transformers.model.masks import FLASH, first_seen
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.recent_queries import RecentQueries
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.layer_inputs import AttentionSettings, DecodingInputs
from kvpolicy.selection import compress, gather_positions, gather_slots


@attrs.frozen(eq=False)
class WindowSurvivors:
    """A choice for layers with a sliding window: keep all tokens that the next token's window sees.

    The window bounds the layer, so that the policy does not choose there. In rows shorter than the
    window, which it does not bound, the policy chooses.

    Args:
        near: ``[batch, kv_heads or 1, key_len]`` bool, the keys that the window will see.
        short: ``[batch, 1, 1]`` bool, the rows in which the policy chooses.
        leaves_short_rows: Whether there are such rows.
        counts: For each row, the number of tokens of each head that the window will see, if it can
            be computed from lengths alone, without reading a tensor; else None.
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
    ) -> WindowSurvivors:
        """Find the keys of a sliding layer that the next token's window sees.

        ``seen_len`` are the rows' ``lengths`` as Python ints, None if unknown; for ``held_len`` see
        `LayerContext`.
        """
        lengths = lengths.to(positions.device)[:, None, None]
        short = lengths <= window
        near = (positions >= 0) & (positions >= first_seen(lengths, window))
        counts = None
        if held_len is not None and held_len == seen_len:  # all tokens up to the last
            counts = tuple(seen - max(first_seen(seen, window), 0) for seen in seen_len)
        if implementation in FLASH:
            return WindowSurvivors(near, short, leaves_short_rows=False, counts=counts)
        shorter = bool(short.any()) if seen_len is None else min(seen_len) <= window
        return WindowSurvivors(near, short, shorter, counts)

    def kept(self, chosen: Tensor | None) -> Tensor:
        """Return the slots that the layer keeps, in short rows those ``chosen`` by the policy."""
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


def carried_for(observed: RecentQueries, keys: Tensor, carries: int) -> Tensor:
    """Return the scorer's state ``[batch, kv_heads, key_len, carries]``, 0 for newer keys."""
    held = observed.carried
    if held is None:
        return torch.zeros(*keys.shape[:3], carries, dtype=torch.float32, device=keys.device)
    return pad(held, (0, 0, 0, keys.shape[2] - held.shape[2]))


@attrs.frozen(eq=False)
class Due:
    """A record of the rows of a batch in which layers evict now; other rows keep all tokens."""

    rows: Tensor
    tokens: SeenTokens

    @staticmethod
    def of(rows: Sequence[int], tokens: SeenTokens) -> Due | None:
        """Record the ``rows`` in which layers evict now; None if these are all rows, or no row."""
        if len(rows) in (0, tokens.batch):
            return None
        which = on_device(rows, tokens.lengths.device)
        return Due(which, tokens.take_rows(which))


@attrs.frozen(eq=False)
class LayerCandidates:
    """A record of all tokens that a layer holds during an answer, from which it chooses.

    Args:
        stored: The tensors held, if attention computes more heads from them; else keys and values.
        positions: ``[batch, kv_heads or 1, key_len]`` int64, positions of the slots stored, -1 on
            padding.
        tokens: The tokens seen, the last of which count as appended.
    """

    layer: PolicyLayer
    index: int
    num_layers: int
    keys: Tensor
    values: Tensor
    stored: tuple[Tensor, Tensor]
    positions: Tensor
    scores: AttentionSettings
    tokens: SeenTokens
    observed: RecentQueries

    def choose(
        self,
        decoding: DecodingEviction,
        window: int | None,
        implementation: str,
        follows: Tensor | None = None,
        due: Due | None = None,
    ) -> Tensor:
        """Let the layer choose which of the tokens it holds to keep; return the slots kept.

        Only the rows that are ``due`` choose; None for all. ``follows`` is the choice of an earlier
        layer that holds the same tokens, which this layer keeps too; None if it chooses by itself.
        """
        held, order = self._padding_first()
        carries = decoding.state_size
        carried = carried_for(self.observed, self.keys, carries) if carries else None
        if carried is not None and order is not None:
            carried = gather_slots(carried, order)
        if due is None:
            kept, carried = held._decided(decoding, window, implementation, follows, carried)
        else:
            rows = due.rows.to(self.keys.device)
            follows = None if follows is None else follows.to(rows.device)[rows]
            part, own = held._of_rows(due, rows), None if carried is None else carried[rows]
            kept, own = part._decided(decoding, window, implementation, follows, own)
            kept = held._with_others(kept, rows)
            if carried is not None and own is not None:
                carried = carried.index_copy(0, rows, own)
        layer, observed = self.layer, self._still_looked_at(decoding, due)
        if layer.indexed is not None:
            layer.indexed.show_held(order)
        layer.store(*held.stored, held.positions, kept, carried)
        if observed is not None:
            layer.observed = attrs.evolve(observed, carried=layer.observed.carried)
        return kept

    def _decided(
        self,
        decoding: DecodingEviction,
        window: int | None,
        implementation: str,
        follows: Tensor | None,
        carried: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return which cache slots the layer keeps, and the scorer's new state; see `choose`."""
        if follows is not None:
            if carried is not None:
                carried = decoding.update_state(self._context(decoding, carried))
            return follows.to(self.positions.device), carried
        if window is None:
            return decoding.decide(self._context(decoding, carried))
        near = WindowSurvivors.of(self.positions, self.tokens.lengths, window, implementation)
        if not near.leaves_short_rows:
            return near.kept(None), None
        chosen, carried = decoding.decide(self._context(decoding, carried))
        return near.kept(chosen), carried

    def _of_rows(self, due: Due, rows: Tensor) -> LayerCandidates:
        """Return a copy for only the rows in which the layer evicts now."""
        keys, values, *stored, positions = (
            each.index_select(0, rows)
            for each in (self.keys, self.values, *self.stored, self.positions)
        )
        return attrs.evolve(
            self,
            keys=keys,
            values=values,
            stored=(stored[0], stored[1]),
            positions=positions,
            tokens=due.tokens,
            observed=self.observed.rows(rows),
        )

    def _with_others(self, kept: Tensor, rows: Tensor) -> Tensor:
        """Combine the cache slots kept in the evicting rows with all slots of the other rows."""
        slots = torch.arange(self.positions.shape[2], device=kept.device)
        whole = torch.where(self.positions >= 0, slots, -1)
        own = pad(kept, (len(slots) - kept.shape[2], 0), value=-1)
        whole = whole.index_copy(0, rows, own)
        return whole[:, :, int((whole < 0).all(dim=0).all(dim=0).sum()) :]

    def _still_looked_at(self, decoding: DecodingEviction, due: Due | None) -> RecentQueries | None:
        """Return the decoded queries to remember for the next eviction; None if it needs none."""
        asked, tokens, observed = decoding.num_queries, self.tokens, self.observed
        if due is None and (not asked or asked <= decoding.every):
            return None
        if asked is None and due is not None:  # of the rows that have not chosen, those since
            observed = observed.without_rows(due.rows)
            asked = max(count for count in tokens.since if count < decoding.every)
        return observed.last(asked, tokens, tokens.unbroken) if asked else None

    def _padding_first(self) -> tuple[LayerCandidates, Tensor | None]:
        """Sort each head's padding before its tokens; return the result and the order of slots."""
        if not (self.tokens.padded or self.layer.contents.padded):
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

    def _context(self, decoding: DecodingEviction, carried: Tensor | None) -> LayerContext:
        device, layer, tokens = self.keys.device, self.layer, self.tokens
        new, slots = on_device(tokens.since, device), torch.arange(max(tokens.since), device=device)
        places = None
        if self.observed.count and decoding.num_queries != 0:
            queries, places = self.observed.shown(tokens)
        else:
            batch, _, _, head_dim = self.keys.shape
            queries = self.keys.new_empty(batch, layer.facts.query_heads, 0, head_dim)
        values = self.values
        return layer_context(
            self.index,
            self.num_layers,
            layer,
            AttentionInputs(queries, self.keys, values, self.scores),
            self.positions.expand(-1, self.keys.shape[1], -1),
            new_valid=slots >= len(slots) - new[:, None],
            seen_len=tuple(tokens.lengths.tolist()),
            stored=self.stored,
            tokens=tokens,
            decoding=DecodingInputs(carried, places),
            rotary=layer.facts.rotary(tokens.given_places) if decoding.needs_rotary else None,
            output_weight=layer.facts.weight(values) if decoding.needs_output_weight else None,
        )._showing(decoding.num_queries)
