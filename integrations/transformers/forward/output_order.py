"""Put a decoder's output into the order of the input's columns: states and attention weights."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.integrations.transformers.forward.inputs import take_columns
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.define(eq=False)
class AttendedKeys:
    """A record of the positions of the keys that every layer attends to in a forward.

    A layer holds its tokens without gaps, and without the padding of the input. If it holds every
    token, its attention weights can be given by the columns of the input, as without a cache.

    Args:
        layers: Layers that attend; for other layers no attention weights are returned, or None.
        positions: By layer, -1 on padding.
    """

    layers: list[int]
    positions: dict[int, Tensor] = attrs.field(factory=dict)

    def in_columns(
        self, attentions: tuple[Tensor | None, ...], tokens: SeenTokens, order: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Reorder the returned attention weights by input columns, for layers that hold all tokens.

        ``attentions`` are those of every layer, or of those that attend. ``order`` ``[batch,
        new_len]`` is the input column of each query; None for the order of the input. Weights are 0
        on padding. They are unchanged for a layer that has evicted tokens or never got some.
        """
        alone = len(attentions) == len(self.layers)
        return tuple(
            attention
            if attention is None or index not in self.positions
            else _in_columns(attention, self.positions[index], tokens, order)
            for index, attention in zip(
                self.layers if alone else range(len(attentions)), attentions, strict=True
            )
        )


def _in_columns(
    attention: Tensor, positions: Tensor, tokens: SeenTokens, order: Tensor | None
) -> Tensor:
    device = attention.device
    positions, valid = positions.to(device), tokens.valid.to(device)
    lengths = tokens.lengths.to(device)[:, None]
    queries = attention.shape[2]
    whole = (positions >= 0).sum(dim=-1) == lengths
    if not bool(whole.all()) or (order is not None and order.shape[1] != queries):
        return attention
    # The column of each position, and one more column for padding.
    heads, seen = positions.shape[1], tokens.seen
    columns = pad((~valid).to(torch.uint8).argsort(dim=1, stable=True), (0, 1), value=seen)
    flat = positions.masked_fill(positions < 0, seen).flatten(1)
    index = columns.gather(1, flat).view_as(positions)
    index = index.repeat_interleave(attention.shape[1] // heads, dim=1)
    index = index[:, :, None].expand(-1, -1, queries, -1)
    wide = attention.new_zeros(*attention.shape[:3], seen + 1)
    wide = wide.scatter(3, index, attention)[..., :seen]
    if order is None:
        return wide
    return take_columns(wide.transpose(1, 2), order.argsort(dim=1).to(device)).transpose(1, 2)


def in_input_order(
    output: Any,
    tokens: SeenTokens,
    columns: Tensor | None,
    propagated: dict[int, Tensor],
    attended: AttendedKeys | None,
) -> Any:
    """Return a decoder's output with its tokens back in the order of the input.

    The input's columns were read in the order ``columns``; None if they were not moved. Hidden
    states after tokens were dropped are left unchanged, in the order of the tokens that were passed
    on. Attention weights are by input column, where nothing was evicted.
    """
    if attended is not None and isinstance(output, tuple):
        # Hidden states have three axes, attention weights four.
        output = tuple(
            attended.in_columns(part, tokens, columns)
            if isinstance(part, tuple) and all(getattr(each, "ndim", 0) == 4 for each in part)
            else part
            for part in output
        )
    elif attended is not None and output.get("attentions") is not None:
        output["attentions"] = attended.in_columns(output["attentions"], tokens, columns)
    if columns is None:
        return output
    back, count = columns.argsort(dim=1), columns.shape[1]

    def last(hidden: Tensor) -> Tensor:
        whole = hidden.shape[1] == count
        return take_columns(hidden, back) if whole and not propagated else hidden

    def of_layers(states: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put the hidden states of all layers before the first drop back into input order."""
        if any(each is not None and getattr(each, "ndim", 0) != 3 for each in states):
            return states
        whole = 1 + min(propagated, default=len(states))
        restored = (None if each is None else take_columns(each, back) for each in states[:whole])
        return (*restored, *states[whole:])

    return _changed(output, last, of_layers)


@attrs.frozen
class Filling:
    """Padding that gives layers' outputs as many tokens as the input, though some were dropped.

    Hidden states stay at the places of their tokens. The next layer, and the decoder's output, get
    them without the padding again; see `ModelQuirks.refills`.

    Attributes:
        slots: For each layer whose output was padded, the places of its tokens among all tokens of
            the input, ``[batch, passed_len]`` int64, -1 on padding.
    """

    count: int
    slots: dict[int, Tensor] = attrs.field(factory=dict, init=False)

    def filled(self, index: int, hidden: Tensor, slots: Tensor | None, axis: int) -> Tensor:
        """Return a layer's output with zeros at the places of the tokens that it does not have.

        ``slots`` ``[batch, passed_len]`` are the places of those that it has; None if it has all.
        """
        if slots is None:
            return hidden
        self.slots[index] = slots
        places = torch.where(slots < 0, self.count, slots).to(hidden.device)  # the last is cut off
        shape = [1] * hidden.ndim
        shape[axis - 1 : axis + 1] = places.shape
        sizes = list(hidden.shape)
        sizes[axis] = self.count + 1
        whole = hidden.new_zeros(sizes)
        return whole.scatter(axis, places.view(shape).expand_as(hidden), hidden).narrow(
            axis, 0, self.count
        )

    def cut(self, output: Any) -> Any:
        """Return a decoder's output without the padding that `filled` added."""
        if not self.slots:
            return output
        return _changed(
            output,
            lambda last: self._cut(last, max(self.slots)),
            # The hidden states before and behind each layer; not its attention weights.
            lambda states: tuple(self._cut(each, i - 1) for i, each in enumerate(states)),
        )

    def _cut(self, hidden: Any, index: int) -> Any:
        slots = self.slots.get(index)
        whole = getattr(hidden, "ndim", 0) == 3 and hidden.shape[1] == self.count
        return hidden if slots is None or not whole else take_columns(hidden, slots)


def _changed(
    output: Any, last: Callable[[Tensor], Tensor], each: Callable[[tuple[Any, ...]], Any]
) -> Any:
    """Change a decoder's last hidden state, and each tuple of the hidden states of all layers."""
    if isinstance(output, tuple):
        others = (each(part) if isinstance(part, tuple) else part for part in output[1:])
        return (last(output[0]), *others)
    for name, change in (("last_hidden_state", last), ("hidden_states", each)):
        if output.get(name) is not None:
            output[name] = change(output[name])
    return output


def joined_outputs(first: Any, second: Any) -> Any:
    """Concatenate a decoder's outputs for earlier and later tokens, as of one forward."""
    if isinstance(second, tuple):
        return (torch.cat([first[0], second[0]], dim=1), *second[1:])
    second.last_hidden_state = torch.cat([first.last_hidden_state, second.last_hidden_state], dim=1)
    if second.get("hidden_states") is not None:
        pairs = zip(first.hidden_states, second.hidden_states, strict=True)
        second.hidden_states = tuple(torch.cat(pair, dim=1) for pair in pairs)
    return second


def without_states(output: Any) -> Any:
    """Return a decoder's output with its hidden states cut to no tokens."""
    return _changed(output, lambda last: last[:, :0], lambda each: each)
