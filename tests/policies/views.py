"""A row of a layer as the slow reference is shown it."""

from torch import Tensor

from kvpolicy import LayerContext
from tests.reference.attention import Entry
from tests.reference.methods import LayerView


def view_of(
    context: LayerContext,
    row: int,
    *,
    rope_theta: float | None = None,
    output_weight: Tensor | None = None,
) -> LayerView:
    """A row's tokens without padding, with the queries that the context shows of them.

    Args:
        context: the layer.
        row: which of its rows.
        rope_theta: base of the rotary frequencies, where the method asks.
        output_weight: `[hidden, query_heads * value_dim]`, likewise.
    """
    entries = [
        [
            Entry(position, context.keys[row, head, slot], context.values[row, head, slot])
            for slot, position in enumerate(context.positions[row, head].tolist())
            if position >= 0
        ]
        for head in range(context.kv_heads)
    ]
    new_len = int(context.new_valid[row].sum())
    shown = min(new_len, context.query_len)
    queries = [of_head[context.query_len - shown :] for of_head in context._queries[row]]
    positions = [entry.position for entry in entries[0]][len(entries[0]) - new_len :]
    return LayerView(
        context.layer_idx,
        context.num_layers,
        queries,
        positions,
        entries,
        context.seen_len[row],
        context.attention.scaling,
        rope_theta,
        output_weight,
    )


def slots_of(indices: Tensor, context: LayerContext, row: int, head: int = 0) -> list[int]:
    """Chosen keys of a row and head `[count]`, counted from its first token."""
    padding = int((~context.valid[row, head]).sum())
    return [slot - padding for slot in indices.tolist() if slot >= 0]


def new_of(indices: Tensor, context: LayerContext, row: int) -> list[int]:
    """Tokens of a row that go on `[count]`, counted from its first new token."""
    padding = int((~context.new_valid[row]).sum())
    return [slot - padding for slot in indices.tolist() if slot >= 0]
