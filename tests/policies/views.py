"""A row of a layer as the slow reference is shown it."""

from typing import Any

from torch import Tensor

from kvpolicy import LayerContext, PropagationPolicy
from tests.reference.attention import Entry
from tests.reference.methods import LayerView


def view_of(context: LayerContext, row: int, **more: Any) -> LayerView:
    """A row's tokens without padding, with the queries that the context shows of them.

    Args:
        context: the layer.
        row: which of its rows.
        more: the rotary base or the output weight, where the method asks.
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
    return LayerView(
        context.layer_idx,
        context.num_layers,
        [of_head[context.query_len - shown :] for of_head in context._queries[row]],
        [entry.position for entry in entries[0]][len(entries[0]) - new_len :],
        entries,
        context.seen_len[row],
        context.attention.scaling,
        **more,
    )


def group_of(view: LayerView, head: int) -> list[list[Tensor]]:
    """The queries of a KV head's query heads."""
    group = len(view.queries) // len(view.entries)
    return [list(each) for each in view.queries[head * group : (head + 1) * group]]


def slots_of(indices: Tensor, context: LayerContext, row: int, head: int = 0) -> list[int]:
    """Chosen keys of a row and head `[count]`, counted from its first token."""
    padding = int((~context.valid[row, head]).sum())
    return [slot - padding for slot in indices.tolist() if slot >= 0]


def new_of(indices: Tensor, context: LayerContext, row: int) -> list[int]:
    """Tokens of a row that go on `[count]`, counted from its first new token."""
    padding = int((~context.new_valid[row]).sum())
    return [slot - padding for slot in indices.tolist() if slot >= 0]


def passed_by(
    part: PropagationPolicy, saliency: Tensor | None, context: LayerContext
) -> list[list[int]] | None:
    """The tokens of each row that go on, counted from the first new slot; None for all."""
    passed = part.propagate(saliency, context)
    return None if passed is None else passed.tolist()
