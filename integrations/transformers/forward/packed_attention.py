"""Attend with one decoded token to packed keys and values, without unpacking them.

`update` gives a model a stand-in tensor for packed keys. If the stand-in reaches sdpa attention
unchanged, the attention of one token is computed on the packed form, on a CPU and without a mask.
All other code reads the layer unpacked: later turns, draft tokens, choices in a bounded answer, and
other devices. Fixed buffers are padded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kvpolicy.integrations.transformers.state.packed import Packed


class Unpacked(Tensor):
    """A stand-in tensor for packed keys or values, unpacked only when something computes with it.

    Attention modules pass the tensors of a cache on unchanged, so that packed attention never
    unpacks them. Any other code that reads the tensor gets the unpacked values.
    """

    _read: Callable[[], Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def pair(held: Packed) -> tuple[Tensor, Tensor]:
        """Make stand-in tensors for packed keys and values, with the shape of the padded ones."""
        whole: list[tuple[Tensor, Tensor]] = []

        def part(index: int) -> Tensor:
            if not whole:
                whole.append(held.read())
            return whole[0][index]

        keys, values = (
            Unpacked((*held.shape[:3], width), held, functools.partial(part, index))
            for index, width in enumerate(held.widths)
        )
        return keys, values

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], held: Packed, read: Callable[[], Tensor]) -> Unpacked:
        """Make a stand-in tensor that has a shape and dtype, and calls ``read`` for its values."""
        made: Unpacked = Tensor._make_wrapper_subclass(
            cls, shape, dtype=held.dtype, device=held.lengths.device
        )
        made._read = read
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the base class has no class method here
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Unpack the stand-ins among an operation's arguments, then run the operation."""
        args, kwargs = tree_map_only(Unpacked, lambda each: each._read(), (args, kwargs or {}))
        return func(*args, **kwargs)


def may_attend(held: object) -> bool:
    """True if `packed_attention` supports these keys: on a CPU, without autograd or autocast."""
    # On other devices its many small calls take longer than unpacking. Autograd is not supported,
    # and autocast would have to convert all keys and values.
    return (
        isinstance(held, Packed)
        and held.lengths.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def packed_attention(query: Tensor, held: Packed, scaling: float | None) -> Tensor:
    """Compute the attention of one new token per row to all packed keys and values.

    Its own are appended already. The result is ``[batch, 1, query_heads, value_dim]``.
    """
    (keys, values), recent = held.parts()
    new_keys, new_values = (each.flatten(0, 1) for each in recent)
    batch, query_heads, _, head_dim = query.shape
    (heads, count, _), width = new_keys.shape, held.width
    queries = query.reshape(heads, -1, head_dim)
    # Scores of heads with fewer tokens are on the right, as with padding on the left.
    scores = queries.new_full((heads, queries.shape[1], width + count), -torch.inf)
    torch.bmm(queries, new_keys.mT, out=scores.narrow(2, width, count))
    for own, products, tokens in zip(
        queries, scores, torch.split(keys, list(held.counts)), strict=True
    ):
        into = products.narrow(1, width - len(tokens), len(tokens))
        torch.mm(own, tokens.mT, out=into)
    scores *= head_dim**-0.5 if scaling is None else scaling
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    output = weights.narrow(2, width, count) @ new_values
    for own, total, tokens in zip(
        weights, output, torch.split(values, list(held.counts)), strict=True
    ):
        total.addmm_(own.narrow(1, width - len(tokens), len(tokens)), tokens)
    return output.view(batch, 1, query_heads, -1)
