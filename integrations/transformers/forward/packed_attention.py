"""One decoded token's attention to what rows and heads hold without padding, never unpacked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kvpolicy.integrations.transformers.state.packed import Packed


class Unpacked(Tensor):
    """Keys or values that are unpacked only once something computes with them.

    Attention modules hand on what a cache gives them: the packed form then does without. What looks
    at them in any other way finds what it expects.
    """

    _read: Callable[[], Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def pair(held: Packed) -> tuple[Tensor, Tensor]:
        """Keys and values ``[batch, kv_heads, kept_len, head_dim]`` of what is held."""
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
        """Stand for what ``read`` gives, of a shape."""
        made: Unpacked = Tensor._make_wrapper_subclass(
            cls, shape, dtype=held.dtype, device=held.lengths.device
        )
        made._read = read
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the base's is no class method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute with what is stood for."""
        args, kwargs = tree_map_only(Unpacked, lambda each: each._read(), (args, kwargs or {}))
        return func(*args, **kwargs)


def may_attend(held: object) -> bool:
    """Whether a token's attention to what a layer holds may be that of `packed_attention`."""
    # Elsewhere its many small calls take longer than unpacking; autograd is not thought of, and
    # autocast would have to convert all that is held.
    return (
        isinstance(held, Packed)
        and held.lengths.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def packed_attention(query: Tensor, held: Packed, scaling: float | None) -> Tensor:
    """Attention of one token a row to all that is held.

    Args:
        query: ``[batch, query_heads, 1, head_dim]``.
        held: What the layer holds, the token itself appended.
        scaling: Of products; that of the head dimension if None.

    Returns:
        ``[batch, 1, query_heads, value_dim]``, as attention functions give it.
    """
    (keys, values), recent = held.parts()
    new_keys, new_values = (each.flatten(0, 1) for each in recent)
    batch, query_heads, _, head_dim = query.shape
    (heads, count, _), width = new_keys.shape, held.width
    queries = query.reshape(heads, -1, head_dim)
    # Those of heads with fewer tokens stand to the right, as where padding is on the left.
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
