"""A prompt that comes in several forwards: what earlier ones leave for the policy's act.

That is the queries that the policy looks at. Where it looks at all of them and sums over them, it
is the sums: every chunk's queries have seen then what a prompt's would have.
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
from kvpolicy.part_calls import advanced
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import gather_slots


@attrs.frozen(eq=False)
class Chunks:
    """The earlier chunks of a prompt, and as many of their queries as the policy looks at.

    Args:
        num_queries: Trailing queries the policy looks at, as `CachePolicy.num_queries`.
        columns: Columns of the chunks so far, padding included.
        row_lens: ``[batch]`` int64, tokens of each row in them.
        valid: ``[batch, held_len]`` bool, of the columns whose queries are held.
        queries: By layer, ``[batch, query_heads, held_len, head_dim]``.
        carried: By layer, ``[batch, kv_heads, key_len, carries]``, what the scorer carries of the
            queries so far for each key, in the place of those; see `Scorer.advance`.
        staged: What further stages are to read, where tokens are dropped; None where none are.
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
        """With one more chunk.

        Args:
            valid: ``[batch, new_len]`` bool, the chunk's columns.
            queries: By layer, those of the chunk from `first_needed` on.
            carried: By layer, what is carried with it.
        """
        lens, own = valid.sum(dim=1), self.first_needed(valid)
        if own:  # the chunk alone has all queries
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
        """The last column from which on every row has all the queries the policy looks at.

        0 where there are not as many.
        """
        if self.num_queries is None:
            return 0
        enough = valid.flip(1).cumsum(dim=1).flip(1) >= self.num_queries
        return max(int(enough.all(dim=0).sum()) - 1, 0)

    def shown(self, index: int, queries: Tensor, new_valid: Tensor) -> Tensor:
        """A layer's trailing queries of all chunks, each row's padding before its tokens.

        Args:
            index: The layer's.
            queries: Those of the last chunk, ``[batch, query_heads, new_len, head_dim]``.
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
        """``[batch, prompt_len]`` bool of the whole prompt, padding before tokens.

        Args:
            new_valid: ``[batch, new_len]`` bool, the last chunk's tokens.
        """
        length = self.columns + new_valid.shape[1]
        lens = new_valid.sum(dim=1)
        first = length - (lens if self.row_lens is None else self.row_lens + lens)
        return torch.arange(length, device=new_valid.device) >= first[:, None]


@attrs.frozen(eq=False)
class ContinuedScorer(Scorer):
    """A scorer that is shown a prompt's last queries only, and goes on from what it carries.

    Args:
        scorer: One that sums over all queries.
        carried: ``[batch, kv_heads, key_len, carries]``, of the queries before.
        new_valid: ``[batch, new_len]`` bool, which of the queries shown are tokens'.
    """

    scorer: Scorer
    carried: Tensor
    new_valid: Tensor

    @property
    def num_queries(self) -> None:
        """All that there are."""
        return

    @property
    def unscored_tail(self) -> int:
        """That of the scorer."""
        return self.scorer.unscored_tail

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        # The prompt's slots have all padding before the tokens; the queries are a chunk's own.
        valid = self.new_valid.to(context.keys.device)
        context = attrs.evolve(context, carried=self.carried, new_valid=valid)
        return self.scorer.advance(context)[0]


def sums_over_all(policy: CachePolicy) -> bool:
    """Whether a policy looks at all queries of a prompt, and what its scorer carries says as much.

    What other scorers make of all queries need not be the same chunk by chunk.
    """
    if policy.scorer is None or policy.history_layers:
        return False  # later layers are shown what the scorer says of every query head
    if policy.decoding is not None and policy.decoding.carries:
        return False
    return declares(policy.scorer, "accumulates")


def _wider(carried: Tensor, key_len: int) -> Tensor:
    """What is carried, with 0 for new keys."""
    return pad(carried, (0, 0, 0, key_len - carried.shape[2]))


def _reaching_to(carried: Tensor | None, context: LayerContext) -> Tensor | None:
    return None if carried is None else _wider(carried, context.key_len)


class ChunkForward(ActingForward):
    """A forward over a chunk that does not end its prompt: appended, its queries remembered.

    The last layer is run for the tokens whose outputs are asked for.

    Args:
        args: See `ActingForward`.
        chunks: Those before it.
        missing: Columns of the prompt that are still to be read, the chunk's among them.
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
        """The prompt so far, this chunk included."""
        return self._chunks.with_chunk(self.new_valid, self._queries, self._carried)

    def update(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `Forward.update`; then an attention function is to show the queries."""
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
        """Remember the layer's queries: what it keeps is chosen when the prompt has ended."""
        assert self._pending is not None
        layer, queries = self.layers[index], inputs.queries
        if inputs.keys.shape[1] != self._pending[0].shape[1]:
            layer.choose_once()
        layer.query_heads = queries.shape[1]
        if sums_over_all(self.policy):
            assert self.policy.scorer is not None
            context = self._context(index, inputs)
            before = self._chunks.carried.get(index)
            context = attrs.evolve(context, carried=_reaching_to(before, context))
            self._carried[index] = self._carry_on(context)
        elif self.policy.num_queries != 0:
            first = self._first_needed
            self._queries[index] = queries[:, :, first:].clone() if first else queries
        self._pending = None

    def _carry_on(self, context: LayerContext) -> Tensor:
        """What the scorer carries on."""
        assert self.policy.scorer is not None
        with torch.autocast(context.keys.device.type, enabled=False):
            _, carried = advanced(self.policy.scorer, context, self._checks)
        return carried


class LastChunkForward(ActingForward):
    """The forward that ends a prompt of several chunks: the policy acts on all of them."""

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
        """What is carried for the keys so far, for each that the layer sees now."""
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
    """The output of two forwards as that of one: hidden states one after the other.

    Args:
        first: The decoder's output for the earlier tokens, a `ModelOutput`.
        second: That for the later ones, a `ModelOutput` or a tuple whose first entry is the last
            hidden state.
    """
    if isinstance(second, tuple):
        return (torch.cat([first[0], second[0]], dim=1), *second[1:])
    second.last_hidden_state = torch.cat([first.last_hidden_state, second.last_hidden_state], dim=1)
    if second.get("hidden_states") is not None:
        pairs = zip(first.hidden_states, second.hidden_states, strict=True)
        second.hidden_states = tuple(torch.cat(pair, dim=1) for pair in pairs)
    return second
