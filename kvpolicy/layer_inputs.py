"""The groups of a `LayerContext`: how the layer attends, what it gives to parts, and decoding."""

import attrs
from torch import Tensor

from kvpolicy.checks import check_kind
from kvpolicy.errors import ShapeError
from kvpolicy.heads import Heads
from kvpolicy.rotary import RotaryEmbedding


@attrs.frozen(eq=False)
class AttentionSettings:
    """The settings by which a layer's attention turns query-key products into scores.

    Args:
        scaling: Factor on the product of query and key before the softmax.
        softcap: The scaled product ``x`` becomes ``softcap * tanh(x / softcap)``; None if the model
            has no such bound.
        sinks: ``[query_heads]``, an extra logit in each head's softmax, as in GPT-OSS; None if the
            model has none.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def capped(self, scores: Tensor) -> Tensor:
        """Apply the softcap, if there is one, to scaled products of any shape, in place."""
        if self.softcap is None:
            return scores
        return scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def check(self, query_heads: int) -> None:
        """Check that there are sinks for all query heads; TypeError or ShapeError if not."""
        if self.sinks is None:
            return
        check_kind("sinks", self.sinks, Tensor)
        if self.sinks.shape != (query_heads,):
            raise ShapeError(
                f"sinks must be [query_heads] = [{query_heads}], got {list(self.sinks.shape)}"
            )


@attrs.frozen(eq=False)
class LayerInputs:
    """A layer's heads, and the inputs that parts get only if they declare that they read them.

    Args:
        heads: Says whether all of the layer's heads are in the context's keys, as they are unless
            the model is tensor-parallel. Parts use its methods for what they compute over all
            heads.
        rotary: The layer's rotary embedding, if a part declares `Part.needs_rotary`.
        output_weight: ``[query_heads, value_dim, hidden]``, the weights of the layer's output
            projection by head, if a part declares `Part.needs_output_weight`.
        history: float32 ``[batch, heads, new_len]`` each, what the policy's scorer gave this
            layer's new tokens at earlier layers, the nearest layer last; values on padding are
            ignored. The number is the largest `Part.history_layers` of the parts, or fewer at the
            first layers. Layers at which nothing is chosen (sliding windows, recurrences) have no
            entry.
    """

    heads: Heads = attrs.field(factory=Heads)
    rotary: RotaryEmbedding | None = None
    output_weight: Tensor | None = None
    history: tuple[Tensor, ...] = ()

    def check(self, batch: int, query_heads: int, new_len: int, value_dim: int) -> None:
        """Check that heads, weights and history fit a context; TypeError or ShapeError if not."""
        check_kind("heads", self.heads, Heads)
        check_kind("history", self.history, tuple)
        for each in self.history:
            check_kind("history", each, Tensor)
            if each.ndim != 3 or (each.shape[0], each.shape[2]) != (batch, new_len):
                raise ShapeError(
                    f"history must hold tensors [batch, heads, new_len] with batch={batch} and "
                    f"new_len={new_len}, got {list(each.shape)}"
                )
        weight = self.output_weight
        if weight is None:
            return
        check_kind("output_weight", weight, Tensor)
        if weight.ndim != 3 or weight.shape[:2] != (query_heads, value_dim):
            raise ShapeError(
                f"output_weight must be [query_heads, value_dim, hidden] = [{query_heads}, "
                f"{value_dim}, hidden], got {list(weight.shape)}"
            )


@attrs.frozen(eq=False)
class DecodingInputs:
    """What a scorer gets from earlier choices, in an answer or in a prompt read in chunks.

    Args:
        state: float32 ``[batch, kv_heads, key_len, state_size]``, the scorer's state for each key
            after the previous choice, 0 on new keys; None if the scorer keeps no state, or has
            none yet. See `Scorer.update`.
        query_positions: ``[batch, query_len]`` int64, the position of each query's token, -1 on
            padding; given while decoding, where some of these tokens may have been evicted. None if
            the queries belong to the last slots. See `LayerContext.query_places`.
    """

    state: Tensor | None = None
    query_positions: Tensor | None = None

    def check(self, keys: tuple[int, int, int], query_len: int) -> None:
        """Check that both fit the axes of the ``keys``; TypeError or ShapeError if not."""
        state, placed = self.state, self.query_positions
        if placed is not None:
            check_kind("query_positions", placed, Tensor)
            if placed.shape != (keys[0], query_len):
                raise ShapeError(
                    f"query_positions must be [batch, query_len] = {[keys[0], query_len]}, got "
                    f"{list(placed.shape)}"
                )
        if state is not None:
            check_kind("state", state, Tensor)
            if state.shape[:3] != keys:
                raise ShapeError(
                    f"state must be [batch, kv_heads, key_len, state_size] with {list(keys)}, got "
                    f"{list(state.shape)}"
                )


# The inputs that most layers give; frozen, so that all layers can share them.
PLAIN_LAYER = LayerInputs()
NO_DECODING = DecodingInputs()
