"""Remember a prompt's chunks until its end, when the policy acts on all of them.

Each chunk leaves the queries that the policy looks at. If the scorer sums over all queries, each
chunk leaves the sums instead: its queries have then seen the same keys as in one forward.

With the first chunk, layers reserve memory for the whole prompt (`Pass.missing`). Later chunks are
written behind the slots that a recorded state holds, so that undoing a chunk needs no second copy.
Layers with windows hold only what the next token sees (`chunk_windows`). No other layer may forget
a token before the prompt's end, whatever the policy: all later tokens of the prompt attend to it.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.declarations import declares
from kvpolicy.integrations.transformers.forward.chunk_windows import ChunkWindows
from kvpolicy.integrations.transformers.forward.layer_contexts import History, InPrompt, widened
from kvpolicy.integrations.transformers.forward.passes import PassState, Stored
from kvpolicy.integrations.transformers.forward.stage import StagedPrompt
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.layer_inputs import DecodingInputs
from kvpolicy.part_calls import updated
from kvpolicy.policy import CachePolicy
from kvpolicy.precision import without_autocast
from kvpolicy.selection import gather_slots


@attrs.frozen(eq=False)
class Chunks:
    """A record of the chunks of an unfinished prompt, with the queries that the policy will need.

    Args:
        num_queries: Number of trailing queries the policy looks at; see `CachePolicy.num_queries`.
        columns: Number of columns of the chunks so far, padding included.
        row_lens: ``[batch]`` int64, number of tokens of each row in these chunks.
        valid: ``[batch, held_len]`` bool, for the columns whose queries are held, False on padding.
        parts: Of each chunk whose queries are held, the number of their columns, and the queries
            by layer, ``[batch, query_heads, columns, head_dim]``.
        carried: By layer, ``[batch, kv_heads, key_len, carries]``, the scorer's state for each key
            after the queries so far, in place of these queries; see `Scorer.update`.
        staged: What further stages must read, if tokens are dropped; None if no tokens are dropped.
    """

    num_queries: int | None
    columns: int = 0
    row_lens: Tensor | None = None
    valid: Tensor | None = None
    parts: tuple[tuple[int, Mapping[int, Tensor]], ...] = ()
    carried: Mapping[int, Tensor] = attrs.field(factory=dict)
    staged: StagedPrompt | None = None

    def with_chunk(
        self, valid: Tensor, queries: Mapping[int, Tensor], carried: Mapping[int, Tensor]
    ) -> Chunks:
        """Return a copy of the record with one more chunk, whose columns are ``valid``.

        ``queries`` are its queries from `first_needed` on, and ``carried`` the scorer's state, by
        layer. Layers may be added to both later.
        """
        own = valid[:, self.first_needed(valid) :]
        columns = own if self.valid is None else torch.cat([self.valid, own], dim=1)
        parts, before = (*self.parts, (own.shape[1], queries)), self.first_needed(columns)
        while before and parts[0][0] <= before:
            before -= parts[0][0]
            columns, parts = columns[:, parts[0][0] :], parts[1:]
        lens = valid.sum(dim=1)
        return attrs.evolve(
            self,
            columns=self.columns + valid.shape[1],
            row_lens=lens if self.row_lens is None else self.row_lens + lens,
            valid=columns,
            parts=parts,
            carried=carried,
        )

    @property
    def asked(self) -> frozenset[int]:
        """The layers of which queries are held."""
        return frozenset(index for _, queries in self.parts for index in queries)

    def first_needed(self, valid: Tensor) -> int:
        """Return the column where the trailing queries begin that the policy looks at."""
        if self.num_queries is None:
            return 0
        enough = valid.flip(1).cumsum(dim=1).flip(1) >= self.num_queries
        return max(int(enough.all(dim=0).sum()) - 1, 0)

    def shown(self, index: int, queries: Tensor, new_valid: Tensor) -> Tensor:
        """Return a layer's trailing queries that the policy looks at, joined over all chunks.

        ``new_valid`` ``[batch, new_len]`` are the last chunk's tokens.
        """
        valid = new_valid if self.valid is None else torch.cat([self.valid, new_valid], dim=1)
        order = valid.to(torch.uint8).argsort(dim=1, stable=True)
        if self.num_queries is not None:
            order = order[:, max(order.shape[1] - self.num_queries, 0) :]
        held = [each[index] for _, each in self.parts]
        joined = torch.cat([*held, queries], dim=2) if held else queries
        places = order.to(joined.device)[:, None, :, None]
        return joined.gather(2, places.expand(-1, joined.shape[1], -1, joined.shape[3]))

    def prompt_valid(self, new_valid: Tensor) -> Tensor:
        """Return which columns of the whole prompt are tokens, moved behind each row's padding."""
        length = self.columns + new_valid.shape[1]
        lens = new_valid.sum(dim=1)
        first = length - (lens if self.row_lens is None else self.row_lens + lens)
        return torch.arange(length, device=new_valid.device) >= first[:, None]


class Remember(InPrompt):
    """Remember the queries of a prompt's chunk until the prompt ends, when the policy acts.

    Args:
        only: The layers whose queries are needed; None for all layers.
    """

    def __init__(
        self, chunks: Chunks, history: History | None = None, only: frozenset[int] | None = None
    ) -> None:
        super().__init__(history)
        self._before, self._only = chunks, only
        self._queries: dict[int, Tensor] = {}
        self._carried: dict[int, Tensor] = {}

    def begin(self, at: PassState) -> None:
        """See `AtQueries.begin`."""
        super().begin(at)
        self._sums = sums_over_all(at.policy)
        self._first_needed = self._before.first_needed(at.reach.valid)
        self._windows = ChunkWindows(at)
        self.holding_anew = self._windows.layers

    def waits(self) -> bool:
        """See `AtQueries.waits`."""
        return True

    def chunks(self, at: PassState) -> Chunks:
        """Return the record of the prompt's chunks so far, this pass's included."""
        return self._before.with_chunk(at.reach.valid, self._queries, self._carried)

    def settle(self, *layers: int) -> None:
        """End some layers, or all, after the record of seen tokens was given to them."""
        for index in layers or self.holding_anew:
            self._windows.settle(index)

    def observe(self, at: PassState, index: int, inputs: AttentionInputs, stored: Stored) -> None:
        """Remember a layer's queries, or the state of a scorer that sums over all queries."""
        layer = at.layers[index]
        expands = inputs.keys.shape[1] != stored[0].shape[1]
        if expands:
            layer.choose_once()
        if layer.facts.shows_queries:
            layer.facts.query_heads = inputs.queries.shape[1]
            if not self._windows.never_choose(index):
                self._remember(at, index, inputs, stored)
        if index in self.holding_anew:
            one_choice = expands or layer.one_choice
            kept = self._windows.narrow(index, stored, one_choice=one_choice)
            if index in self._carried:
                self._carried[index] = gather_slots(self._carried[index], kept)

    def _remember(self, at: PassState, index: int, inputs: AttentionInputs, stored: Stored) -> None:
        queries = inputs.queries
        needed = self._only is None or index in self._only or index in self.history.layers
        if self._sums and needed:
            scorer, before = at.policy.scorer, self._before.carried.get(index)
            assert scorer is not None
            context = self.context(at, index, inputs, stored)
            wide = None if before is None else widened(before, context.key_len)
            context = attrs.evolve(context, decoding=DecodingInputs(wide))
            with without_autocast(context.keys.device):
                self._carried[index] = updated(scorer, context, self.checks)[1]
        elif at.policy.num_queries != 0 and needed:
            first = self._first_needed
            self._queries[index] = queries[:, :, first:].clone() if first else queries


class AtEnd(InPrompt):
    """A base class for what the pass that ends a prompt does at each layer.

    Args:
        chunks: The chunks before the last; None if the prompt came in one forward.
    """

    padding_first = True

    def __init__(self, chunks: Chunks | None = None, history: History | None = None) -> None:
        super().__init__(history)
        self._chunks = chunks
        self.carried = {} if chunks is None else chunks.carried

    def shown(self, at: PassState, index: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries of all chunks of the prompt; see `InPrompt.shown`."""
        chunks = self._chunks
        if chunks is None:
            return queries, at.reach.valid
        new_valid = chunks.prompt_valid(at.reach.valid)
        if index in self.carried or index not in chunks.asked:
            return queries, new_valid
        return chunks.shown(index, queries, at.reach.valid), new_valid

    def summed(self, at: PassState, context: LayerContext) -> Tensor:
        """Return the saliency of a layer's keys, whose scorer has summed over the chunks before."""
        carried = widened(self.carried[context.layer_idx], context.key_len)
        order = at.masks.order
        if order is not None:
            carried = gather_slots(carried, order.to(carried.device))
        # The queries are those of the last chunk alone.
        valid = at.reach.valid.to(context.keys.device)
        context = attrs.evolve(context, decoding=DecodingInputs(carried), new_valid=valid)
        assert at.policy.scorer is not None
        with without_autocast(context.keys.device):
            return updated(at.policy.scorer, context, self.checks)[0]


def sums_over_all(policy: CachePolicy) -> bool:
    """True if a scorer only sums over all queries; others may score chunk by chunk differently."""
    if policy.scorer is None or policy.history_layers:
        return False  # later layers see the saliency of every query head
    if policy.decoding is not None and policy.decoding.state_size:
        return False
    return declares(policy.scorer, "accumulates")
