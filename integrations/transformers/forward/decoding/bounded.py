"""A forward of decoded tokens under a policy that bounds what layers hold of an answer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpolicy.decoding import DecodingEviction
from kvpolicy.integrations.transformers.forward.append import Forward
from kvpolicy.integrations.transformers.forward.decoding.choosing import Due, Held
from kvpolicy.integrations.transformers.model.routing import AttentionInputs, without_queries
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


class DecodingForward(Forward):
    """Appends its tokens, remembers their queries, and lets layers choose when it is time.

    It is time in a row with the forward that appends its ``every``-th token since the last choice:
    every layer, once it has attended, chooses among all that it holds, the new tokens included.
    Rows in which it is not time keep all that they hold.
    """

    bounded = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.policy.decoding is not None
        self._decoding: DecodingEviction = self.policy.decoding
        rows = self.tokens.due(self._decoding.every)
        self._chooses = bool(rows)
        self._due = Due.of(rows, self.tokens)
        self._unbroken = self.tokens.unbroken if self._decoding.num_queries else 0
        self._kept: Tensor | None = None  # the slots that the last layer with an indexer keeps

    @property
    def _asks(self) -> bool:
        return self._chooses

    def update(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `Forward.update`; where queries are needed, an attention function is to show them."""
        given = super().update(index, keys, values)
        layer = self.layers[index]
        if not layer.shows_queries:  # it attends to what it is handed, whatever is kept of it
            if self._chooses:
                self._choose(index, without_queries(layer.query_heads, *given), given)
        elif self._chooses or self._decoding.num_queries != 0:
            self._pending = given
        return given

    def observe(self, index: int, inputs: AttentionInputs) -> None:
        """Remember the layer's queries; when it is time, let it choose."""
        assert self._pending is not None
        stored, self._pending = self._pending, None
        layer, asked = self.layers[index], self._decoding.num_queries
        layer.query_heads = inputs.queries.shape[1]
        if asked != 0:
            layer.observed = layer.observed.noted(
                inputs.queries, self.tokens, asked, self._unbroken
            )
        if self._chooses:
            self._choose(index, inputs, stored)

    def _choose(self, index: int, inputs: AttentionInputs, stored: tuple[Tensor, Tensor]) -> None:
        """Let a layer choose among all that it holds, which is ``stored``."""
        layer = self.layers[index]
        held = Held(
            layer=layer,
            index=index,
            num_layers=len(self.layers),
            keys=inputs.keys,
            values=inputs.values,
            stored=stored,
            positions=self._positions(layer, layer.choices, inputs.keys.device),
            scores=inputs.scores,
            tokens=self.tokens,
            observed=layer.observed,
        )
        how = self._decoding, self._window(index), self.implementation
        if isinstance(layer, IndexedLayer):
            # Whoever attends to slots that another layer's indexer has picked keeps the same.
            follows = self._kept if layer.borrows else None
            chosen = held.choose(*how, follows=follows, due=self._due)
            self._kept = chosen.indices
        else:
            chosen = held.choose(*how, due=self._due)
        chosen.store()

    def finish(self) -> SeenTokens:
        """See `Forward.finish`; after a choice nothing counts as appended."""
        if self._chooses:
            self.tokens = self.tokens.settled(self._decoding.every)
        return super().finish()
