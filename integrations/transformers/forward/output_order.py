"""Put a decoder's output into the order of the input's columns, if these were moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.attentions import AttendedKeys
from kvpolicy.integrations.transformers.forward.inputs import take_columns
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


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

    Args:
        count: Number of tokens of the input.

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
        return _changed(output, self._last, self._each) if self.slots else output

    def _last(self, hidden: Tensor) -> Tensor:
        last: Tensor = self._cut(hidden, max(self.slots))
        return last

    def _each(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        """Cut the hidden states before and behind each layer; not its attention weights."""
        return tuple(self._cut(each, index - 1) for index, each in enumerate(states))

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
