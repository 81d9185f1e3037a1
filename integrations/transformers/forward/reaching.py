"""Keep track of which tokens of a pass reach the current layer."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.inputs import Incoming, take_columns
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.selection import gather_positions


class ReachingTokens:
    """A record of which tokens of a pass reach the current layer: all, until a layer drops some.

    All tensors are on the device of the pass's inputs.

    Args:
        incoming: The tokens of the pass, and those seen before.
        padded: Whether any column of the context may be padding.
        counts_held: Whether layers hold the tokens that are recorded. Layers of stages may hold
            others.

    Attributes:
        valid: ``[batch, new_len]`` bool, the tokens that reach the layer, False on padding.
        positions: ``[batch, new_len]`` int64, their original positions, -1 on padding.
        every_position: The positions of all tokens of the pass.
        slots: ``[batch, new_len]`` int64, their places among all tokens of the pass; None if all
            tokens reach the layer.
        padded: Whether the tokens seen or the ones that reach the layer may have padding.
        beside: What the previous layer returned beside hidden states, for the tokens it passed on.
    """

    def __init__(self, incoming: Incoming, *, padded: bool, counts_held: bool) -> None:
        self.counts_held = counts_held
        self._before = incoming.tokens
        self.valid = incoming.new_valid
        positions = incoming.positions
        if positions is None:
            positions = incoming.tokens.positions_of(incoming.new_valid)
        self.positions = self.every_position = positions
        self.count = self.valid.shape[1]
        # True also if rows without padding pass on different numbers of tokens.
        self.padded = padded or (
            incoming.positions is not None and not bool(incoming.new_valid.all())
        )
        self.slots: Tensor | None = None
        self.beside: tuple[Tensor, ...] = ()
        self._streams_axis = 1
        # What the layer before was given, by name, and cut to the tokens that reach it.
        self._cut: dict[tuple[str, int], tuple[Any, Any]] = {}

    def token_axis(self, hidden: Tensor) -> int:
        """Return the index of the token axis in a layer's hidden states."""
        return self._streams_axis if hidden.ndim == 4 else 1

    def check(self, module: nn.Module, hidden: Tensor) -> None:
        """Check that the first decoder layer gets exactly one hidden state for each token.

        If there are several streams of hidden states, their axis is before the rows or behind the
        tokens.
        """
        if hidden.ndim == 4:
            rows = tuple(self.valid.shape)
            axes = [axis for axis in (1, 2) if tuple(hidden.shape[axis - 1 : axis + 1]) == rows]
            if len(axes) != 1:
                raise UnsupportedModelError(
                    f"hidden states {list(hidden.shape)} of several streams must have one axis "
                    f"for the {rows[0]} rows and one for the {rows[1]} tokens that no other axis "
                    "can be mistaken for; give another number of either"
                )
            self._streams_axis = axes[0]
        if hidden.ndim == 3 and hidden.shape[1] != self.valid.shape[1]:
            raise UnsupportedModelError(
                "a decoder must give its layers one hidden state for each token, but "
                f"{type(module).__name__} gets {hidden.shape[1]} for {self.valid.shape[1]} "
                "tokens, as if features of an image came before them"
            )

    def arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Cut the arguments ``kwargs``, made for all tokens, to the tokens that reach the layer."""
        if self.slots is None:
            return kwargs
        known, self._cut = self._cut, {}  # layers mostly get the same tensors
        found = {}
        for name, each in kwargs.items():
            if any(each is beside for beside in self.beside):
                found[name] = each
                continue
            cut = known.get((name, id(each)))
            if cut is None or cut[0] is not each:
                cut = each, cut_arguments({name: each}, self.slots, self.count)[name]
            self._cut[name, id(each)] = cut
            found[name] = cut[1]
        return found

    def taken(self, hidden: Tensor, slots: Tensor) -> Tensor:
        """Return the hidden states of only the tokens in ``slots`` ``[batch, count]``."""
        axis = self.token_axis(hidden)
        return take_columns(hidden, slots, axis - 1, axis)

    def slots_in(self, hidden: Tensor) -> Tensor | None:
        """Return the indices of a layer's output tokens, maybe the last only; None if all."""
        count = hidden.shape[self.token_axis(hidden)]
        if self.slots is not None:
            return self.slots[:, -count:]
        ends = torch.arange(self.count - count, self.count, device=self.valid.device)
        return None if self.count == count else ends.expand(self.valid.shape[0], -1)

    def everything(self) -> Tensor:
        """Return the indices of all tokens that reach the layer, among these; -1 on padding."""
        slots = torch.arange(self.valid.shape[1], device=self.valid.device)
        return torch.where(self.valid, slots, -1)

    def pass_on(self, passed: Tensor) -> None:
        """Drop all tokens but those in ``passed`` ``[batch, count]`` for the layers that follow."""
        self.positions = gather_positions(self.positions, passed)
        self.valid, self._cut = self.positions >= 0, {}
        self.lengths = tuple(self.valid.sum(dim=1).tolist())
        self.padded = min(self.lengths) < self.valid.shape[1] or self.padded
        self.slots = passed if self.slots is None else gather_positions(self.slots, passed)

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens in each row that reach the current layer."""
        batch, new_len = self.valid.shape
        return tuple(self.valid.sum(dim=1).tolist()) if self.padded else (new_len,) * batch

    @functools.cached_property
    def appended(self) -> tuple[int, ...]:
        """The number of tokens in each row that layers have appended since the last eviction."""
        appended: Tensor = self._before.appended
        if self._before.padded:
            return tuple((appended >= 0).sum(dim=1).tolist())
        return (appended.shape[1],) * len(appended)

    def seen_by(self, layer: PolicyLayer) -> tuple[int, ...] | None:
        """Return how many tokens of each row a layer attends to, ``held_len``; None if unknown."""
        contents = layer.contents
        if not self.counts_held:
            return None
        if contents.held is None:
            return self.lengths
        if contents.counts is None:
            return None
        # Layers with windows count no token of a prompt in chunks as appended.
        alone = layer.tokens is not None and not layer.tokens.appended.shape[1]
        appended = (0,) * len(self.lengths) if alone else self.appended
        return tuple(map(sum, zip(contents.counts, appended, self.lengths, strict=True)))


_WHOLE = ("attention_mask", "cross_attention_states")


def cut_arguments(kwargs: dict[str, Any], slots: Tensor, length: int) -> dict[str, Any]:
    """Return a layer's arguments, made for ``length`` tokens, cut to the tokens in ``slots``.

    Tensors with an entry for each token, such as rotary embeddings, are cut along the axis of
    tokens, which may follow other axes. The mask is not cut, and neither are tensors with an entry
    for each image patch.
    """
    return {
        name: value if name in _WHOLE else _cut(value, slots, length)
        for name, value in kwargs.items()
    }


def cut_alike(value: Any, hidden: Tensor, slots: Tensor) -> Any:
    """Cut an extra output of a layer to the given tokens, if it has an entry for each token."""
    # Attention weights have four axes, the second of which are heads.
    like = isinstance(value, Tensor) and value.ndim == 3 and value.shape[:2] == hidden.shape[:2]
    return take_columns(value, slots) if like else value


def _cut(value: Any, slots: Tensor, length: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_cut(part, slots, length) for part in value)
    if not isinstance(value, Tensor):
        return value
    axes = _row_and_token_axes(value, slots.shape[0], length)
    return value if axes is None else take_columns(value, slots, *axes)


def _row_and_token_axes(value: Tensor, batch: int, length: int) -> tuple[int, int] | None:
    """Return the row axis and the token axis of a tensor; None if it has no token axis."""
    for tokens in range(1, value.ndim):
        before = value.shape[:tokens]
        if value.shape[tokens] != length or not {1, batch} & set(before):
            continue
        # One entry may serve all rows.
        size = batch if batch in before else 1
        return tokens - 1 - before[::-1].index(size), tokens
    return None
