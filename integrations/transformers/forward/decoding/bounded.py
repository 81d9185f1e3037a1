"""Run a forward of decoded tokens under a policy that bounds how many tokens layers hold."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpolicy.decoding import DecodingEviction
from kvpolicy.integrations.transformers.forward.append import Forward
from kvpolicy.integrations.transformers.forward.decoding.choosing import Due, LayerCandidates
from kvpolicy.integrations.transformers.model.routing import AttentionInputs, without_queries
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


class DecodingForward(Forward):
    """A forward that appends tokens, remembers their queries, and lets layers evict when due.

    A row is due in the forward that appends its ``every``-th token since the last choice. Every
    layer then chooses, after it has attended, among all tokens it holds, the new ones included.
    Rows that are not due keep all tokens.
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
        self._kept: Tensor | None = None  # slots kept by the last layer with an indexer

    @property
    def _asks(self) -> bool:
        return self._chooses

    def update(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values as `Forward.update` does; wait for queries if they are needed."""
        given = super().update(index, keys, values)
        layer = self.layers[index]
        if not layer.shows_queries:  # it attends to all these keys in any case
            if self._chooses:
                self._choose(index, without_queries(layer.query_heads, *given), given)
        elif self._chooses or self._decoding.num_queries != 0:
            self._pending = given
        return given

    def observe(self, index: int, inputs: AttentionInputs) -> None:
        """Remember the layer's queries, and let the layer choose if a row is due."""
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
        """Let a layer choose among all tokens it holds, which are ``stored``."""
        layer = self.layers[index]
        held = LayerCandidates(
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
            # A layer that uses the slots of another layer's indexer keeps the same tokens.
            follows = self._kept if layer.borrows else None
            chosen = held.choose(*how, follows=follows, due=self._due)
            self._kept = chosen.indices
        else:
            chosen = held.choose(*how, due=self._due)
        chosen.store()

    def finish(self) -> SeenTokens:
        """Finish the forward; after a choice no token counts as appended.

        See `Forward.finish`.
        """
        if self._chooses:
            self.tokens = self.tokens.settled(self._decoding.every)
        return super().finish()
