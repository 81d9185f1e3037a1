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

from torch import Tensor

from kvpolicy.integrations.transformers.forward.decoding.choosing import Due, LayerCandidates
from kvpolicy.integrations.transformers.forward.passes import AtQueries, PassState
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


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

    def observe(
        self, at: PassState, index: int, inputs: AttentionInputs, stored: tuple[Tensor, Tensor]
    ) -> None:
        """Remember a layer's queries, and let the layer evict if this is due in some row."""
        layer, asked = at.layers[index], self._decoding.num_queries
        if layer.facts.shows_queries:
            layer.facts.query_heads = inputs.queries.shape[1]
        if layer.facts.shows_queries and asked != 0:
            layer.observed = layer.observed.noted(inputs.queries, at.tokens, asked, self._unbroken)
        if self._chooses:
            self._choose(at, index, inputs, stored)

    def _choose(
        self, at: PassState, index: int, inputs: AttentionInputs, stored: tuple[Tensor, Tensor]
    ) -> None:
        """Let a layer choose which of all the tokens it holds to keep."""
        layer = at.layers[index]
        held = LayerCandidates(
            layer=layer,
            index=index,
            num_layers=len(at.layers),
            keys=inputs.keys,
            values=inputs.values,
            stored=stored,
            positions=at.masks.positions(layer, layer.choices, inputs.keys.device),
            scores=inputs.scores,
            tokens=at.tokens,
            observed=layer.observed,
        )
        how = self._decoding, at.masks.windows[index], at.call.implementation
        # A layer that uses the slots of another layer's indexer keeps the same tokens.
        follows = self._kept if layer.indexed is not None and layer.indexed.borrows else None
        kept = held.choose(*how, follows=follows, due=self._due)
        self._kept = kept if layer.indexed is not None else self._kept

    def finish(self, at: PassState) -> SeenTokens:
        """Return the record of seen tokens after layers have evicted; see `AtQueries.finish`."""
        return at.tokens.settled(self._decoding.every) if self._chooses else at.tokens
