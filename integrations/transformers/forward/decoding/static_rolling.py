"""Decode into slots that are freed one by one: a new token takes the slot of an evicted one.

If a rule evicts one token at every step by the attention of the last query (TOVA), nothing must be
moved: the next token is written into the slot of the evicted one, in each head into its own slot.
One computation finds the evicted tokens of all heads and layers. Slots are unordered while an
answer is decoded. Code that reads a layer meanwhile gets them sorted (`PolicyLayer.loosen`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.declarations import declares
from kvpolicy.decoding import DecodingEviction
from kvpolicy.integrations.transformers.forward.decoding.static_choosing import not_shown
from kvpolicy.integrations.transformers.model.masks import Visibility
from kvpolicy.integrations.transformers.model.observing import observed_by
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.recent_queries import RecentQueries
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.layer_inputs import AttentionSettings
from kvpolicy.selection import gather_slots


def takes_places(decoding: DecodingEviction) -> bool:
    """True if a rule evicts one token per step: the one that the last query attends to least."""
    return (
        decoding.every == 1
        and decoding.scorer is not None
        and declares(decoding.scorer, "scores_last_attention")
        and declares(decoding.selector, "keeps_highest")
        and decoding.selector.protected_tail == 1
    )


@attrs.define(eq=False)
class Places:
    """A table, for all layers and heads, of the token in each slot and of the next slot to write.

    Args:
        held: ``[layers, batch, kv_heads, capacity]`` int64 positions, -1 on free slots.
        slots: ``[layers, batch, kv_heads]`` int64, the slot of the current token.
        weights: float32 ``[layers, batch, query_heads, capacity]``, the attention weights of the
            last query; NaN until they are written.
        masks: ``[layers, 1 or batch, 1 or query_heads, 1, capacity]``, in the form of `Visibility`;
            1 if all rows and heads hold equal numbers of tokens.
        protected: Number of first tokens of the context that are never evicted.
        free: The largest number of free slots of a head.
    """

    held: Tensor
    slots: Tensor
    weights: Tensor
    masks: Tensor
    protected: int
    free: int

    @staticmethod
    def of(
        layers: Sequence[PolicyLayer],
        tokens: SeenTokens,
        implementation: str,
        capacity: int,
        protected: int,
    ) -> Places:
        """Make the table for layers that hold fewer tokens than their buffers have slots."""
        places, masks = [], []
        heads = layers[0].facts.query_heads
        for layer in layers:
            positions = layer.positions
            assert positions is not None
            places.append(pad(positions, (0, capacity - positions.shape[2]), value=-1))
            lengths = tokens.lengths.to(positions.device)[:, None]
            mask = Visibility(places[-1], lengths, heads).mask(implementation, layer.dtype)
            assert isinstance(mask, Tensor)  # true for all `IMPLEMENTATIONS`
            masks.append(mask.expand(-1, heads, -1, -1))
        held, shown = torch.stack(places), torch.stack(masks)
        if bool((held[:, :1, :1] < 0).eq(held < 0).all()):  # stays so: rows grow together
            shown = shown[:, :1, :1].contiguous()
        shape = (*held.shape[:2], heads, capacity)
        return Places(
            held=held,
            slots=(held < 0).to(torch.uint8).argmax(dim=-1),
            weights=torch.full(shape, torch.nan, device=held.device),
            masks=shown,
            protected=protected,
            free=int((held < 0).sum(dim=-1).max()),
        )

    def choose(self) -> None:
        """Find the slot for each head's next token: a free one, or the least attended token's.

        That token is forgotten. If this is called again, the slot is free.
        """
        layers, batch, kv_heads, capacity = self.held.shape
        seen = self.weights.view(layers, batch, kv_heads, -1, capacity).mean(dim=3)
        if self.protected:
            seen.masked_fill_((self.held >= 0) & (self.held < self.protected), torch.inf)
        seen.scatter_(3, self.slots[..., None], torch.inf)  # the last token stays
        if self.free:
            seen.masked_fill_(self.held < 0, -1.0)
        least = seen.amin(dim=-1, keepdim=True)
        # Among equal weights the earlier token stays.
        self.slots.copy_(self.held.masked_fill(seen > least, -2).argmax(dim=-1))
        self.held.scatter_(3, self.slots[..., None], -1)

    def advance(self, positions: Tensor) -> None:
        """Enter the token at ``positions`` ``[batch, 1]`` in each head's next slot."""
        layers, _, kv_heads, _ = self.held.shape
        new = positions[None, :, None].to(self.held.device).expand(layers, -1, kv_heads, -1)
        self.held.scatter_(3, self.slots[..., None], new)
        if not self.free:
            return
        rows, heads = self.masks.shape[1:3]
        shown = self.slots[:, :rows]
        shown = shown.repeat_interleave(heads // kv_heads, 2) if heads > 1 else shown[:, :, :1]
        self.masks.scatter_(4, shown[..., None, None], self.masks.dtype == torch.bool)
        self.free -= 1

    def forget(self, positions: Tensor) -> None:
        """Free the slots of the tokens at ``positions`` ``[batch]``, one token of each row."""
        self.held.masked_fill_(self.held == positions[None, :, None, None].to(self.held.device), -1)


@attrs.define(eq=False)
class RollingQueries:
    """A buffer of a layer's last query that also computes the query's attention weights.

    So the weights by which a layer evicts are those by which it attends, computed once.

    Args:
        keys: ``[batch, kv_heads, capacity, head_dim]``.
        query: ``[batch, query_heads, 1, head_dim]``.
        weights: float32 ``[batch, query_heads, capacity]``.
        scores: How products of queries and keys become scores.
    """

    keys: Tensor
    query: Tensor
    weights: Tensor
    scores: AttentionSettings

    def write(self, queries: Tensor, mask: Tensor, values: Tensor | None) -> Tensor | None:
        """Store one token's query and its attention weights; see `QueryRing.write`."""
        self.query.copy_(queries)
        batch, heads, _, head_dim = queries.shape
        keys = self.keys.float().flatten(0, 1)
        scaled = (queries.float() * self.scores.scaling).view(len(keys), -1, head_dim)
        logits = torch.bmm(scaled, keys.transpose(1, 2)).view(batch, heads, 1, -1)
        if self.scores.softcap is not None:
            logits = (logits / self.scores.softcap).tanh() * self.scores.softcap
        if mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask, -torch.inf)
        else:
            logits = logits + mask
        weights = logits.softmax(dim=-1)
        self.weights.copy_(weights[:, :, 0])
        if values is None:
            return None
        weights = weights.to(values.dtype).view(len(keys), -1, keys.shape[1])
        return (weights @ values.flatten(0, 1)).view(batch, 1, heads, -1)


@attrs.define(eq=False)
class RollingKeys:
    """A pair of buffers of a layer's keys and values, in which every head has a next slot.

    Args:
        keys: ``[batch, kv_heads, capacity, head_dim]``.
        values: ``[batch, kv_heads, capacity, head_dim]``.
        slot: ``[batch, kv_heads]`` int64, the slot of the current token.
        filled: ``[1]`` int64, number of tokens written since layers last chose.
        mask: The mask of the current token over the slots, its own included.
        queries: The observer of the query.
    """

    keys: Tensor
    values: Tensor
    slot: Tensor
    filled: Tensor
    mask: Tensor
    queries: RollingQueries

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values; return the whole buffers, free slots included."""
        slot = self.slot[..., None, None]
        self.keys.scatter_(2, slot.expand(-1, -1, 1, keys.shape[3]), keys)
        self.values.scatter_(2, slot.expand(-1, -1, 1, values.shape[3]), values)
        self.filled.add_(1)
        return self.keys, self.values


@attrs.define(eq=False)
class RollingDecoding:
    """A decoding of one answer in which each new token takes the slot of an evicted one.

    Args:
        layers: Every layer's buffers.
        positions: ``[batch, 1]`` int64, rotary positions of the current token after a restart has
            left tokens out; None if they are the positions that the model is given.
        places: Which token is in which slot.
        filled: ``[layers, 1]`` int64, the ``filled`` of all layers.
        left: Number of tokens of the answer that fit, if the layers have memory for fewer tokens
            than their bound; else None.
        steps: Number of tokens whose forward was asked for since layers last chose, 0 or 1.
        checked: Whether it was checked that attention shows its queries.
    """

    layers: list[RollingKeys]
    positions: Tensor | None
    places: Places
    filled: Tensor
    left: int | None
    steps: int = 0
    checked: bool = False

    room = 1
    choice = None
    rests = False

    @staticmethod
    def of(
        layers: Sequence[PolicyLayer],
        tokens: SeenTokens,
        windows: Sequence[int | None],
        implementation: str,
        left: int,
        decoding: DecodingEviction,
    ) -> RollingDecoding | None:
        """Make the buffers for decoding in reused slots; None if the layers do not allow it.

        Args:
            layers: The layers of the cache.
            tokens: The tokens seen.
            windows: Each layer's sliding window; None if it sees all tokens.
            implementation: The model's attention implementation.
            left: The largest number of tokens to come.
            decoding: The rule that bounds the layers.
        """
        most = decoding.most_tokens
        if not takes_places(decoding) or most is None or tokens.appended.shape[1]:
            return None
        # Layers may hold more of a prompt until their first choice.
        fits = all(layer.kept_len <= most for layer in layers)
        if not fits or not _are_alike(layers) or any(each is not None for each in windows):
            return None
        first = decoding.selector.protected_first
        longest = max(layer.kept_len for layer in layers) + left
        capacity, ends = min(most + 1, longest), longest <= most
        places = Places.of(layers, tokens, implementation, capacity, first)
        filled = places.slots.new_zeros(len(layers), 1)
        buffers = []
        for index, layer in enumerate(layers):
            keys, values = layer.claim(capacity)
            weights, slot = places.weights[index], places.slots[index]
            query = keys.new_zeros(keys.shape[0], layer.facts.query_heads, 1, keys.shape[3])
            assert layer.facts.scores is not None
            queries = RollingQueries(keys, query, weights, layer.facts.scores)
            mask = observed_by(places.masks[index], queries)
            for tensor in (keys, values, weights, slot, query, mask, filled[index]):
                # CUDA graphs must know that this tensor never changes its address.
                torch._dynamo.mark_static_address(tensor)
            buffers.append(RollingKeys(keys, values, slot, filled[index], mask, queries))
        positions = None if tokens.skipped is None else torch.zeros_like(tokens.lengths)[:, None]
        return RollingDecoding(buffers, positions, places, filled, left if ends else None)

    def advance(self, positions: Tensor, rotary: Tensor) -> None:
        """See `StaticDecoding.advance`."""
        self.places.advance(positions)
        if self.positions is not None:
            self.positions.copy_(rotary)
        self.steps += 1
        if self.left is not None:
            self.left -= 1

    def follow(self, layers: Sequence[PolicyLayer], tokens: SeenTokens) -> None:
        """Give the layers the new record of seen tokens, and leave their slots unsorted.

        See `StaticDecoding.follow`.
        """
        for index, layer in enumerate(layers):
            layer.follow(tokens)
            layer.loosen(functools.partial(self._sorted, index, tokens.appended.shape[1]))

    def choose(self) -> bool:
        """Evict one token from every head that has no free slot.

        Returns:
            True if there is memory for the next token. Otherwise nothing was evicted, since layers
            hold fewer tokens than their bound.

        Raises:
            UnsupportedModelError: Attention did not show its queries.
        """
        if not self.checked:
            if bool(self.places.weights.isnan().any()):
                raise not_shown()
            self.checked = True
        self.filled.zero_()
        self.steps = 0
        if self.left == 0:
            return False
        self.places.choose()
        return True

    def unwritten(self) -> int:
        """See `StaticDecoding.unwritten`."""
        return self.steps - int(self.filled.min())

    def read_queries(self, layers: Sequence[PolicyLayer], seen: int) -> None:
        """See `StaticDecoding.read_queries`."""
        for layer, buffers in zip(layers, self.layers, strict=True):
            query = buffers.queries.query.clone()
            layer.observed = RecentQueries(query, seen) if self.steps else RecentQueries()

    def _sorted(self, index: int, appended: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's keys and values sorted by position, and the kept tokens' positions.

        Keys and values include the appended tokens; positions do not.
        """
        places, buffers = self.places.held[index], self.layers[index]
        count = int((places >= 0).sum(dim=-1).max())
        positions, order = places.sort(dim=-1)
        positions, order = positions[..., -count:], order[..., -count:]
        order = order.masked_fill(positions < 0, -1)
        keys, values = gather_slots(buffers.keys, order), gather_slots(buffers.values, order)
        return keys, values, positions[..., : count - appended]


def _are_alike(layers: Sequence[PolicyLayer]) -> bool:
    """True if all layers have one shape and one device, and no layer has attention sinks."""
    found = set()
    for layer in layers:
        if layer.held is None or layer.facts.scores is None or layer.facts.scores.sinks is not None:
            return False
        batch, kv_heads, _, head_dim = layer.held.shape
        found.add((batch, kv_heads, head_dim, layer.facts.query_heads, layer.device))
    return len(found) == 1
