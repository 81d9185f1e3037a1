"""Let layers evict between two steps of a decoding into fixed buffers.

Attention is given nothing of a cache but keys, values and a mask. So the mask of a layer names the
ring buffer that its attention writes queries into (`observed_attention`). The tokens that a layer
keeps are moved into the same buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.decoding import DecodingEviction
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.decoding.choosing import LayerCandidates, Selection
from kvpolicy.integrations.transformers.forward.decoding.static_queries import StaticQueries
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.define(eq=False)
class StaticChoice:
    """The rule by which layers evict from fixed buffers, with the layers' last queries.

    Args:
        decoding: The rule that bounds the answer.
        windows: Each layer's sliding window; None if it sees all tokens.
        implementation: The model's attention implementation.
        rings: By layer, its last queries; None if the rule needs no queries.
        begun: By layer, the number of queries that its ring began with.
        pending: Choices that layers have made but not stored, if a choice was interrupted.
    """

    decoding: DecodingEviction
    windows: Sequence[int | None]
    implementation: str
    rings: list[StaticQueries | None]
    begun: list[int] = attrs.field(factory=list)
    pending: list[Selection] = attrs.field(factory=list)

    @staticmethod
    def of(
        decoding: DecodingEviction,
        layers: Sequence[PolicyLayer],
        windows: Sequence[int | None],
        implementation: str,
    ) -> StaticChoice:
        """Make a ring buffer for every layer, filled with the queries remembered so far."""
        rings: list[StaticQueries | None] = []
        slots: dict[torch.device, Tensor] = {}
        for layer in layers:
            ring, keys = None, layer.keys
            if keys is not None and decoding.num_queries != 0:
                zero = torch.zeros(1, dtype=torch.int64, device=keys.device)
                slot = slots.setdefault(keys.device, zero)
                ring = StaticQueries.like(keys, layer.facts.query_heads, decoding, slot)
            rings.append(ring)
        choice = StaticChoice(decoding, windows, implementation, rings)
        choice.load(layers)
        return choice

    def load(self, layers: Sequence[PolicyLayer]) -> None:
        """Copy the queries that the layers remember into the layers' ring buffers."""
        self.begun = []
        for layer, ring in zip(layers, self.rings, strict=True):
            self.begun.append(0 if ring is None else min(layer.observed.count, ring.capacity))
            if ring is not None:
                ring.load(layer.observed)

    def advance(self, step: int) -> None:
        """Set the ring slot for the query of decoding step ``step``, counted from 0."""
        for ring, begun in self._first_rings():
            ring.slot.fill_((begun + step) % ring.capacity)

    def _first_rings(self) -> list[tuple[StaticQueries, int]]:
        """Return one ring buffer for each slot counter, which the rings on a device share.

        Each comes with the number of queries it began with.
        """
        pairs = zip(self.rings, self.begun, strict=True)
        found = {id(ring.slot): (ring, begun) for ring, begun in pairs if ring is not None}
        return list(found.values())

    def read(self, layers: Sequence[PolicyLayer], steps: int, seen: int) -> None:
        """Copy the queries in the ring buffers to the layers, after a number of decoding steps.

        Args:
            layers: The layers of the cache.
            steps: Number of tokens since the rings were loaded.
            seen: Number of columns seen.
        """
        for layer, ring, begun in zip(layers, self.rings, self.begun, strict=True):
            if ring is not None:
                layer.observed = ring.read(begun, steps, seen, layer.observed)

    def check_shown(self, layers: Sequence[PolicyLayer]) -> None:
        """Check that the model's attention has shown the queries of every decoding step.

        Raises:
            UnsupportedModelError: Queries are missing.
        """
        shown = [each for layer in layers if (each := layer.observed.queries) is not None]
        if self.decoding.num_queries == 0 or not shown:
            return
        home = shown[0].device
        # The queries of a token are all missing or all present.
        missing = [each[..., 0].isnan().any().to(home) for each in shown]
        if bool(torch.stack(missing).any()):
            raise not_shown()

    def choose(self, layers: Sequence[PolicyLayer], tokens: SeenTokens) -> None:
        """Let every layer choose the tokens to keep, for `take` to store later."""
        self.pending = [
            self._of_layer(index, layer, len(layers), tokens)
            for index, layer in enumerate(layers)
            if layer.held is not None
        ]

    def _of_layer(
        self, index: int, layer: PolicyLayer, num_layers: int, tokens: SeenTokens
    ) -> Selection:
        assert layer.held is not None
        assert layer.facts.scores is not None
        keys, values = layer.held.read()
        positions = layer.positions
        assert positions is not None
        held = LayerCandidates(
            layer=layer,
            index=index,
            num_layers=num_layers,
            keys=keys,
            values=values,
            stored=(keys, values),
            positions=positions,
            scores=layer.facts.scores,
            tokens=tokens,
            observed=layer.observed,
        )
        window = self.windows[index]
        near = window if window is not None and window < tokens.seen else None
        return held.choose(self.decoding, near, self.implementation)

    def take(self) -> None:
        """Store the choices that `choose` has made in the layers, each in memory of its own.

        If this is interrupted, the next call continues with the remaining choices.
        """
        while self.pending:
            self.pending[0].store(room=0)
            self.pending.pop(0)

    def capacity_for(self, index: int, layer: PolicyLayer, until: int, left: int) -> int:
        """Return how many slots the fixed buffer of a layer needs.

        Args:
            index: Index of the layer.
            layer: The layer in the cache.
            until: Number of tokens until layers choose.
            left: Number of tokens of the answer that must fit.
        """
        return min(self._bound(index, layer, until), layer.kept_len + left)

    def _bound(self, index: int, layer: PolicyLayer, until: int) -> int:
        """Return how many slots the fixed buffer of a layer needs for an answer of any length."""
        most = None if self.windows[index] is not None else self.decoding.most_tokens
        bound = layer.kept_len + until
        return bound if most is None else max(bound, most + self.decoding.every)

    def fits(self, index: int, layer: PolicyLayer, capacity: int, left: int) -> bool:
        """True if a layer that has just evicted fits its buffer, and the buffer is not too long.

        Args:
            index: Index of the layer.
            layer: The layer in the cache.
            capacity: Number of slots of the buffers.
            left: See `capacity_for`.
        """
        every = self.decoding.every
        if self.capacity_for(index, layer, every, left) > capacity:
            return False
        varies = layer.contents.ragged or self.windows[index] is not None
        return varies or capacity <= self._bound(index, layer, every)


def not_shown() -> UnsupportedModelError:
    """Make the error for a model whose attention did not show the queries of every step."""
    return UnsupportedModelError(
        "model must pass a layer's mask unchanged to its attention function if a policy reads "
        "the queries of an answer, but did not show all of them; leave max_new_tokens of the "
        "cache at None"
    )
