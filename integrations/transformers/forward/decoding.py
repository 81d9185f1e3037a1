"""Keep an answer bounded: layers remember decoded queries, and evict when it is time.

A layer remembers as many queries as the scorer of the rule looks at (`RecentQueries`). If the
scorer sums over all steps, its state is not updated at each step: no token is evicted between two
choices, so that all queries since the last choice can be added at once (`Scorer.update`), and
removing a token again means forgetting its query. A query may outlive the key of its token, so that
queries have positions of their own (`LayerContext.query_positions`).

A layer whose queries cannot be observed chooses when the cache is given its keys. A layer that
attends to another layer's keys sees what that layer saw, and follows its choice. A layer that uses
the slots of another layer's indexer also follows its choice, but sums scorer state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.context import LayerContext
from kvpolicy.decoding import DecodingEviction
from kvpolicy.host_counts import on_device
from kvpolicy.integrations.transformers.forward.layer_contexts import layer_context, widened
from kvpolicy.integrations.transformers.forward.passes import AtQueries, PassState, Stored
from kvpolicy.integrations.transformers.model.masks import FLASH, first_seen
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.recent_queries import RecentQueries
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.layer_inputs import DecodingInputs
from kvpolicy.selection import compress, gather_positions, gather_slots


class Bound(AtQueries):
    """Remember the queries of an answer's tokens, and let layers evict at the rule's interval.

    A row is due in the pass that appends its ``every``-th token since the last choice. Every layer
    then chooses, after it has attended, among all tokens it holds, the new ones included. Rows that
    are not due keep all tokens.
    """

    bounded = True

    def begin(self, at: PassState) -> None:
        """Find the rows in which layers must evict in this pass; see `AtQueries.begin`."""
        decoding = at.policy.decoding
        assert decoding is not None
        self._decoding = decoding
        rows = at.tokens.due(decoding.every)
        self.asks = self._chooses = bool(rows)
        self._due = Due.of(rows, at.tokens)
        self._unbroken = at.tokens.unbroken if decoding.num_queries else 0
        self._kept: Tensor | None = None  # slots kept by the last layer with an indexer

    def waits(self) -> bool:
        """See `AtQueries.waits`."""
        return self._chooses or self._decoding.num_queries != 0

    def observe(self, at: PassState, index: int, inputs: AttentionInputs, stored: Stored) -> None:
        """Remember a layer's queries, and let the layer evict if this is due in some row."""
        layer, asked = at.layers[index], self._decoding.num_queries
        if layer.facts.shows_queries:
            layer.facts.query_heads = inputs.queries.shape[1]
        if layer.facts.shows_queries and asked != 0:
            layer.observed = layer.observed.noted(inputs.queries, at.tokens, asked, self._unbroken)
        if not self._chooses:
            return
        positions = at.masks.positions(layer, layer.choices, inputs.keys.device)
        held = LayerCandidates(
            at, index, self._decoding, inputs, stored, positions, at.tokens, layer.observed
        )
        # A layer that uses the slots of another layer's indexer keeps the same tokens.
        follows = self._kept if layer.indexed is not None and layer.indexed.borrows else None
        kept = held.choose(follows, self._due)
        self._kept = kept if layer.indexed is not None else self._kept

    def finish(self, at: PassState) -> SeenTokens:
        """Return the record of seen tokens after layers have evicted; see `AtQueries.finish`."""
        return at.tokens.settled(self._decoding.every) if self._chooses else at.tokens


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
        return _without_empty(torch.where(self.short, chosen, kept))


def _without_empty(kept: Tensor) -> Tensor:
    """Cut the first places, those that are -1 in every row and head."""
    return kept[:, :, int((kept < 0).all(dim=0).all(dim=0).sum()) :]


def carried_for(observed: RecentQueries, keys: Tensor, carries: int) -> Tensor:
    """Return the scorer's state ``[batch, kv_heads, key_len, carries]``, 0 for newer keys."""
    held = observed.carried
    if held is None:
        return torch.zeros(*keys.shape[:3], carries, dtype=torch.float32, device=keys.device)
    return widened(held, keys.shape[2])


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

    at: PassState
    index: int
    decoding: DecodingEviction
    inputs: AttentionInputs
    stored: Stored
    positions: Tensor
    tokens: SeenTokens
    observed: RecentQueries

    @property
    def layer(self) -> PolicyLayer:
        """The layer that chooses."""
        return self.at.layers[self.index]

    def choose(self, follows: Tensor | None, due: Due | None) -> Tensor:
        """Let the layer choose which of the tokens it holds to keep; return the slots kept.

        Only the rows that are ``due`` choose; None for all. ``follows`` is the choice of an earlier
        layer that holds the same tokens, which this layer keeps too; None if it chooses by itself.
        """
        held, order = self._padding_first()
        carries = self.decoding.state_size
        carried = carried_for(self.observed, self.inputs.keys, carries) if carries else None
        if carried is not None and order is not None:
            carried = gather_slots(carried, order)
        if due is None:
            kept, carried = held._decided(follows, carried)
        else:
            rows = due.rows.to(self.positions.device)
            follows = None if follows is None else follows.to(rows.device)[rows]
            part, own = held._of_rows(due, rows), None if carried is None else carried[rows]
            kept, own = part._decided(follows, own)
            kept = held._with_others(kept, rows)
            if carried is not None and own is not None:
                carried = carried.index_copy(0, rows, own)
        layer, observed = self.layer, self._still_looked_at(due)
        if layer.indexed is not None:
            layer.indexed.show_held(order)
        layer.store(*held.stored, held.positions, kept, carried)
        if observed is not None:
            layer.observed = attrs.evolve(observed, carried=layer.observed.carried)
        return kept

    def _decided(
        self, follows: Tensor | None, carried: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return which cache slots the layer keeps, and the scorer's new state; see `choose`."""
        if follows is not None:
            if carried is not None:
                carried = self.decoding.update_state(self._context(carried))
            return follows.to(self.positions.device), carried
        window, how = self.at.masks.windows[self.index], self.at.call.implementation
        if window is None:
            return self.decoding.decide(self._context(carried))
        near = WindowSurvivors.of(self.positions, self.tokens.lengths, window, how)
        if not near.leaves_short_rows:
            return near.kept(None), None
        chosen, carried = self.decoding.decide(self._context(carried))
        return near.kept(chosen), carried

    def _of_rows(self, due: Due, rows: Tensor) -> LayerCandidates:
        """Return a copy for only the rows in which the layer evicts now."""
        positions, observed = self.positions.index_select(0, rows), self.observed.rows(rows)
        return self._each(
            lambda each: each.index_select(0, rows),
            positions=positions,
            tokens=due.tokens,
            observed=observed,
        )

    def _each(self, change: Callable[[Tensor], Tensor], **more: Any) -> LayerCandidates:
        """Return a copy with all keys and values changed."""
        keys, values, *stored = map(change, (self.inputs.keys, self.inputs.values, *self.stored))
        inputs = attrs.evolve(self.inputs, keys=keys, values=values)
        return attrs.evolve(self, inputs=inputs, stored=(stored[0], stored[1]), **more)

    def _with_others(self, kept: Tensor, rows: Tensor) -> Tensor:
        """Combine the cache slots kept in the evicting rows with all slots of the other rows."""
        slots = torch.arange(self.positions.shape[2], device=kept.device)
        whole = torch.where(self.positions >= 0, slots, -1)
        own = pad(kept, (len(slots) - kept.shape[2], 0), value=-1)
        return _without_empty(whole.index_copy(0, rows, own))

    def _still_looked_at(self, due: Due | None) -> RecentQueries | None:
        """Return the decoded queries to remember for the next eviction; None if it needs none."""
        asked, every, observed = self.decoding.num_queries, self.decoding.every, self.observed
        if due is None and (not asked or asked <= every):
            return None
        if asked is None and due is not None:  # of the rows that have not chosen, those since
            observed = observed.without_rows(due.rows)
            asked = max(count for count in self.tokens.since if count < every)
        return observed.last(asked, self.tokens, self.tokens.unbroken) if asked else None

    def _padding_first(self) -> tuple[LayerCandidates, Tensor | None]:
        """Sort each head's padding before its tokens; return the result and the order of slots."""
        if not (self.tokens.padded or self.layer.contents.padded):
            return self, None
        order = (self.positions >= 0).to(torch.uint8).argsort(dim=2, stable=True)
        positions = gather_positions(self.positions, order)
        return self._each(lambda each: gather_slots(each, order), positions=positions), order

    def _context(self, carried: Tensor | None) -> LayerContext:
        keys, layer, decoding, tokens = self.inputs.keys, self.layer, self.decoding, self.tokens
        new = on_device(tokens.since, keys.device)
        slots = torch.arange(max(tokens.since), device=keys.device)
        places = None
        if self.observed.count and decoding.num_queries != 0:
            queries, places = self.observed.shown(tokens)
        else:
            queries = keys.new_empty(len(keys), layer.facts.query_heads, 0, keys.shape[3])
        values = self.inputs.values
        return layer_context(
            self.at,
            self.index,
            attrs.evolve(self.inputs, queries=queries),
            self.positions.expand(-1, keys.shape[1], -1),
            new_valid=slots >= len(slots) - new[:, None],
            seen_len=tuple(tokens.lengths.tolist()),
            stored=self.stored,
            tokens=tokens,
            decoding=DecodingInputs(carried, places),
            rotary=layer.facts.rotary(tokens.given_places) if decoding.needs_rotary else None,
            output_weight=layer.facts.weight(values) if decoding.needs_output_weight else None,
        )._showing(decoding.num_queries)
