"""Read a prompt in several forwards (chunked prefill), after which the policy acts once.

Each chunk leaves the queries that the policy looks at. If the scorer sums over all queries, each
chunk leaves the sums instead: its queries have then seen the same keys as in one forward.
"""

from __future__ import annotations

import copy
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvpolicy.context import LayerContext
from kvpolicy.declarations import declares
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.append import Forward
from kvpolicy.integrations.transformers.forward.prefill import ActingForward
from kvpolicy.integrations.transformers.forward.staged_prompt import StagedPrompt
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.interfaces import Scorer
from kvpolicy.part_calls import updated
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import gather_slots


@attrs.frozen(eq=False)
class Chunks:
    """A record of the earlier chunks of a prompt, with the queries that the policy looks at.

    Args:
        num_queries: Number of trailing queries the policy looks at; see `CachePolicy.num_queries`.
        columns: Number of columns of the chunks so far, padding included.
        row_lens: ``[batch]`` int64, number of tokens of each row in these chunks.
        valid: ``[batch, held_len]`` bool, for the columns whose queries are held, False on padding.
        queries: By layer, ``[batch, query_heads, held_len, head_dim]``.
        carried: By layer, ``[batch, kv_heads, key_len, carries]``, the scorer's state for each key
            after the queries so far, in place of these queries; see `Scorer.update`.
        staged: What further stages must read, if tokens are dropped; None if no tokens are dropped.
    """

    num_queries: int | None
    columns: int = 0
    row_lens: Tensor | None = None
    valid: Tensor | None = None
    queries: dict[int, Tensor] = attrs.field(factory=dict)
    carried: dict[int, Tensor] = attrs.field(factory=dict)
    staged: StagedPrompt | None = None

    def with_chunk(
        self, valid: Tensor, queries: dict[int, Tensor], carried: dict[int, Tensor]
    ) -> Chunks:
        """Return a record with one more chunk.

        Args:
            valid: ``[batch, new_len]`` bool, the chunk's columns.
            queries: By layer, the chunk's queries from `first_needed` on.
            carried: By layer, the scorer's state, this chunk included.
        """
        lens, own = valid.sum(dim=1), self.first_needed(valid)
        if own:  # this chunk alone has all queries needed
            return Chunks(
                self.num_queries,
                self.columns + valid.shape[1],
                lens if self.row_lens is None else self.row_lens + lens,
                valid[:, own:],
                queries,
                carried,
                self.staged,
            )
        columns = valid if self.valid is None else torch.cat([self.valid, valid], dim=1)
        first = self.first_needed(columns)
        return Chunks(
            self.num_queries,
            self.columns + valid.shape[1],
            lens if self.row_lens is None else self.row_lens + lens,
            columns[:, first:],
            {
                index: self._joined(index, new)[:, :, first:].clone()
                for index, new in queries.items()
            },
            carried,
            self.staged,
        )

    def _joined(self, index: int, queries: Tensor) -> Tensor:
        held = self.queries.get(index)
        return queries if held is None else torch.cat([held, queries], dim=2)

    def first_needed(self, valid: Tensor) -> int:
        """Return the last column from which on every row has all queries the policy looks at.

        It is 0 if there are fewer.
        """
        if self.num_queries is None:
            return 0
        enough = valid.flip(1).cumsum(dim=1).flip(1) >= self.num_queries
        return max(int(enough.all(dim=0).sum()) - 1, 0)

    def shown(self, index: int, queries: Tensor, new_valid: Tensor) -> Tensor:
        """Return a layer's trailing queries of all chunks, each row's padding before its tokens.

        Args:
            index: Index of the layer.
            queries: Queries of the last chunk, ``[batch, query_heads, new_len, head_dim]``.
            new_valid: ``[batch, new_len]`` bool, the last chunk's tokens.

        Returns:
            ``[batch, query_heads, query_len, head_dim]``, as many as the policy looks at.
        """
        valid = new_valid if self.valid is None else torch.cat([self.valid, new_valid], dim=1)
        order = valid.to(torch.uint8).argsort(dim=1, stable=True)
        if self.num_queries is not None:
            order = order[:, max(order.shape[1] - self.num_queries, 0) :]
        joined = self._joined(index, queries)
        places = order.to(joined.device)[:, None, :, None]
        places = places.expand(-1, joined.shape[1], -1, joined.shape[3])
        return joined.gather(2, places)

    def prompt_valid(self, new_valid: Tensor) -> Tensor:
        """Return which slots of the whole prompt are tokens, ``[batch, prompt_len]`` bool.

        Padding comes before tokens.

        Args:
            new_valid: ``[batch, new_len]`` bool, the last chunk's tokens.
        """
        length = self.columns + new_valid.shape[1]
        lens = new_valid.sum(dim=1)
        first = length - (lens if self.row_lens is None else self.row_lens + lens)
        return torch.arange(length, device=new_valid.device) >= first[:, None]


@attrs.frozen(eq=False)
class ContinuedScorer(Scorer):
    """A scorer that sees only the queries of a prompt's last chunk, and continues from its state.

    Args:
        scorer: A scorer that sums over all queries.
        carried: ``[batch, kv_heads, key_len, carries]``, its state after the earlier queries.
        new_valid: ``[batch, new_len]`` bool, which of the queries shown belong to tokens.
    """

    scorer: Scorer
    carried: Tensor
    new_valid: Tensor

    @property
    def num_queries(self) -> None:
        """Always None: the scorer looks at all queries."""
        return

    @property
    def unscored_tail(self) -> int:
        """The ``unscored_tail`` of the wrapped scorer."""
        return self.scorer.unscored_tail

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        # The slots of the prompt have all padding before the tokens; the queries are those of one
        # chunk.
        valid = self.new_valid.to(context.keys.device)
        context = attrs.evolve(context, state=self.carried, new_valid=valid)
        return self.scorer.update(context)[0]


def sums_over_all(policy: CachePolicy) -> bool:
    """True if a policy looks at all queries of a prompt and its scorer only sums over them.

    Other scorers may give different results chunk by chunk.
    """
    if policy.scorer is None or policy.history_layers:
        return False  # later layers see the saliency of every query head
    if policy.decoding is not None and policy.decoding.state_size:
        return False
    return declares(policy.scorer, "accumulates")


def _wider(carried: Tensor, key_len: int) -> Tensor:
    """Extend the scorer's state with 0 for new keys."""
    return pad(carried, (0, 0, 0, key_len - carried.shape[2]))


def _reaching_to(carried: Tensor | None, context: LayerContext) -> Tensor | None:
    return None if carried is None else _wider(carried, context.key_len)


class ChunkForward(ActingForward):
    """A forward that appends a chunk before the last of its prompt, and remembers its queries.

    The last layer is run only for the tokens whose outputs are asked for.

    Args:
        args: See `ActingForward`.
        chunks: The chunks before it.
        missing: Number of columns of the prompt that are still to be read, this chunk included.
        kwargs: See `ActingForward`.
    """

    acts = False

    def __init__(self, *args: Any, chunks: Chunks, missing: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.missing = missing
        self._chunks = chunks
        self._first_needed = chunks.first_needed(self.new_valid)
        self._queries: dict[int, Tensor] = {}
        self._carried: dict[int, Tensor] = {}

    @property
    def chunks(self) -> Chunks:
        """The chunks of the prompt so far, this one included."""
        return self._chunks.with_chunk(self.new_valid, self._queries, self._carried)

    def update(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values as `Forward.update` does, then wait for the queries."""
        if self._seen is not None:
            return super().update(index, keys, values)
        found = Forward.update(self, index, keys, values)
        self._pending = found if self.layers[index].shows_queries else None
        return found

    def update_index(self, index: int, keys: Tensor) -> Tensor:
        """See `Forward.update_index`."""
        return Forward.update_index(self, index, keys)

    def enter_layer(
        self, index: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """See `ActingForward.enter_layer`.

        Raises:
            UnsupportedModelError: All tokens of the prompt would see each other.
        """
        if self._sees_all and kwargs.get("attention_mask") is None:
            raise UnsupportedModelError(
                "a prompt must come in one forward where all of its tokens see each other, as with "
                "PaliGemma without token_type_ids; leave prefill_chunk_size at None"
            )
        return super().enter_layer(index, module, hidden, kwargs)

    def _few_go_on(self, index: int) -> bool:
        return index == len(self.layers) - 1 and super()._few_go_on(index)

    def _decide(self, index: int, inputs: AttentionInputs) -> None:
        """Remember the layer's queries; the layer chooses at the end of the prompt."""
        assert self._pending is not None
        layer, queries = self.layers[index], inputs.queries
        if inputs.keys.shape[1] != self._pending[0].shape[1]:
            layer.choose_once()
        layer.query_heads = queries.shape[1]
        if sums_over_all(self.policy):
            assert self.policy.scorer is not None
            context = self._context(index, inputs)
            before = self._chunks.carried.get(index)
            context = attrs.evolve(context, state=_reaching_to(before, context))
            self._carried[index] = self._carry_on(context)
        elif self.policy.num_queries != 0:
            first = self._first_needed
            self._queries[index] = queries[:, :, first:].clone() if first else queries
        self._pending = None

    def _carry_on(self, context: LayerContext) -> Tensor:
        """Update the scorer's state by this chunk's queries."""
        assert self.policy.scorer is not None
        with torch.autocast(context.keys.device.type, enabled=False):
            _, carried = updated(self.policy.scorer, context, self._checks)
        return carried


class LastChunkForward(ActingForward):
    """A forward over the last chunk of a prompt: the policy acts on the whole prompt."""

    def __init__(self, *args: Any, chunks: Chunks, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._chunks = chunks

    def _decide(self, index: int, inputs: AttentionInputs) -> None:
        before = self._chunks.carried.get(index)
        if before is None:
            super()._decide(index, inputs)
            return
        policy, carried = self.policy, self._in_slots(before, inputs)
        assert policy.scorer is not None
        self.policy = copy.copy(policy)
        scorer = ContinuedScorer(policy.scorer, carried, self.new_valid)
        object.__setattr__(self.policy, "scorer", scorer)
        try:
            super()._decide(index, inputs)
        finally:
            self.policy = policy

    def _in_slots(self, carried: Tensor, inputs: AttentionInputs) -> Tensor:
        """Put the scorer's state into the order of the keys that the layer sees, 0 for new keys."""
        wide = _wider(carried, inputs.keys.shape[2])
        if self._order is None:
            return wide
        return gather_slots(wide, self._order.to(wide.device).expand(-1, wide.shape[1], -1))

    def _observed(self, index: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        if self.policy.num_queries == 0:
            return queries[:, :, :0], self._chunks.prompt_valid(self.new_valid)
        if index in self._chunks.carried:
            return queries, self._chunks.prompt_valid(self.new_valid)
        shown = self._chunks.shown(index, queries, self.new_valid)
        return shown, self._chunks.prompt_valid(self.new_valid)


def joined_outputs(first: Any, second: Any) -> Any:
    """Concatenate the outputs of two forwards, as if they had been one.

    Args:
        first: The decoder's output for the earlier tokens, a `ModelOutput`.
        second: The output for the later tokens, a `ModelOutput` or a tuple whose first entry is the
            last hidden state.
    """
    if isinstance(second, tuple):
        return (torch.cat([first[0], second[0]], dim=1), *second[1:])
    second.last_hidden_state = torch.cat([first.last_hidden_state, second.last_hidden_state], dim=1)
    if second.get("hidden_states") is not None:
        pairs = zip(first.hidden_states, second.hidden_states, strict=True)
        second.hidden_states = tuple(torch.cat(pair, dim=1) for pair in pairs)
    return second
