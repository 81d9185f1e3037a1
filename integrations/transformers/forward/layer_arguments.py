"""Cut the arguments that a decoder gives its layers to some of their tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpolicy.integrations.transformers.forward.inputs import take_columns

_WHOLE = ("attention_mask", "cross_attention_states")


def cut_arguments(kwargs: dict[str, Any], slots: Tensor, length: int) -> dict[str, Any]:
    """Return a layer's arguments, cut to the tokens in ``slots``.

    Tensors with an entry for each token, such as rotary embeddings, are cut along the axis of
    tokens, which may follow other axes. The mask is not cut, and neither are tensors with an entry
    for each image patch.

    Args:
        kwargs: By name, for ``length`` tokens.
        slots: ``[batch, count]`` int64, the tokens to take.
        length: Number of tokens.
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
