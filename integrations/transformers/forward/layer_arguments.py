"""The arguments that a decoder gives its layers, for some of their tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpolicy.integrations.transformers.forward.inputs import take_columns

_WHOLE = ("attention_mask", "cross_attention_states")


def cut_arguments(kwargs: dict[str, Any], slots: Tensor, length: int) -> dict[str, Any]:
    """The arguments of a layer for some of its tokens.

    What holds something for each token, such as rotary embeddings, is cut; the mask is not, nor is
    what holds something for each patch of an image.

    Args:
        kwargs: By name, for ``length`` tokens.
        slots: ``[batch, count]`` int64, those that are wanted.
        length: Tokens.
    """
    return {
        name: value if name in _WHOLE else _cut(value, slots, length)
        for name, value in kwargs.items()
    }


def _cut(value: Any, slots: Tensor, length: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_cut(part, slots, length) for part in value)
    if not isinstance(value, Tensor):
        return value
    axes = _row_and_token_axes(value, slots.shape[0], length)
    return value if axes is None else take_columns(value, slots, *axes)


def _row_and_token_axes(value: Tensor, batch: int, length: int) -> tuple[int, int] | None:
    """The axes along which a tensor holds something for each row and each of its tokens."""
    for tokens in range(1, value.ndim):
        before = value.shape[:tokens]
        if value.shape[tokens] != length or not {1, batch} & set(before):
            continue
        # One entry may serve all rows.
        size = batch if batch in before else 1
        return tokens - 1 - before[::-1].index(size), tokens
    return None
