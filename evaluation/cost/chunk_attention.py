"""Run the attention of a chunk to earlier tokens on torch's `meta` device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.integrations.transformers.forward.blocks import (
    BLOCK_BYTES,
    OTHER_BLOCK_BYTES,
    joined,
    joins,
)
from kvpolicy.integrations.transformers.model.masks import Visibility
from kvpolicy.integrations.transformers.surface import sdpa_attention_forward

Kernel = Callable[..., Tensor]


@attrs.frozen
class ChunkAttention:
    """How the layers attend when a prompt is read in chunks, to measure the memory it takes.

    Args:
        device: ``"cuda"`` or ``"cpu"``: where the model is meant to run.
        windows: By layer, how far back it sees; None for all.
        has_gaps: Whether the tokens do not follow each other, being some that were chosen.
    """

    device: str
    windows: tuple[int | None, ...]
    has_gaps: bool = False

    def attend(
        self,
        attention: str,
        kernels: dict[str, Kernel],
        index: int,
        module: nn.Module,
        tensors: tuple[Tensor, Tensor, Tensor],
        **kwargs: Any,
    ) -> Tensor:
        """Return a layer's empty attention output, allocating the memory that a real run would.

        Args:
            attention: See `ModelMemory`.
            kernels: By the name of an attention, what computes it.
            index: The layer's.
            module: Its attention module.
            tensors: Queries, and all keys and values that the layer sees, on ``meta``.
            kwargs: What the module gives its function besides.
        """
        query, key, value = tensors
        window = self.windows[index]
        in_order = not self.has_gaps and (window is None or window >= key.shape[2])
        if attention == "flash" and not self.has_gaps:
            return kernels["flash"](module, query, key, value, None, **kwargs)
        if attention == "sdpa" and in_order and self.device == "cuda":
            # A bias that is not a mask, but makes the kernel repeat the keys.
            return kernels["sdpa"](module, query, key, value, query.new_empty(1), **kwargs)
        alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
        if attention == "sdpa" and in_order and alike and joins(sdpa_attention_forward, kwargs):
            return joined(query, key, value, kwargs.get("scaling"))
        implementation = "eager" if attention == "eager" else "sdpa"
        kernel = kernels[implementation]
        return self._in_blocks(kernel, implementation, window, module, tensors, kwargs)

    def _in_blocks(
        self,
        kernel: Kernel,
        implementation: str,
        window: int | None,
        module: nn.Module,
        tensors: tuple[Tensor, Tensor, Tensor],
        kwargs: dict[str, Any],
    ) -> Tensor:
        query, key, value = tensors
        query_len, seen = query.shape[2], key.shape[2]
        if window is not None and not self.has_gaps:
            seen = min(window + query_len, seen)
        limit = BLOCK_BYTES.get(self.device, OTHER_BLOCK_BYTES)
        element = query.element_size() if implementation == "eager" else 1
        count = min(max(limit // (element * seen), 1), query_len)
        batch = query.shape[0]
        places = torch.arange(seen, device=query.device).expand(batch, 1, -1)
        mask = Visibility(places, places[:, 0, -count:], query.shape[1], window).mask(
            implementation, query.dtype
        )
        # The longest block; all others fit into the memory that it frees.
        output = kernel(
            module, query[:, :, :count], key[:, :, :seen], value[:, :, :seen], mask, **kwargs
        )
        if count == query_len:
            return output
        del mask
        rest = output.new_empty(batch, query_len - count, *output.shape[2:])
        return torch.cat([output, rest], dim=1)
