"""Attend in blocks of queries, where one mask for all would be large.

A chunk of 2,000 tokens behind 100,000 tokens has a mask of 200 million numbers, several times the
size of the layer's keys and values. With blocks, no mask is larger than one block's, and no query
is multiplied with keys after its block or, if there is a window, before the window.
"""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from kvpolicy.attention import block_bytes
from kvpolicy.integrations.transformers.model.masks import FLASH, Mask, Visibility, first_seen
from kvpolicy.integrations.transformers.model.routing import Attend, is_plain
from kvpolicy.interfaces import PropagationPolicy

# This kernel also returns the logarithm of the sum of exponentials, which no public function does.
# If it does not exist, attention is computed under masks.
_KERNEL = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)

# A layer is narrowed if it passes on at most this share of its tokens, since its projections run a
# second time for these.
LARGEST_SHARE = 0.75


def block_len(query: Tensor, key_len: int, mask_heads: int, implementation: str) -> int:
    """Return how many queries to attend with at once, so that a mask over the keys stays small."""
    # On a GPU the limit is higher, since every block repeats the keys for their groups.
    limit = block_bytes(query.device)
    element = query.element_size() if implementation == "eager" else 1
    return max(limit // (element * query.shape[0] * mask_heads * key_len), 1)


def in_blocks(
    run: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    count: int,
    seen_by: Callable[[slice], tuple[slice, Mask]],
) -> Tensor:
    """Attend with ``count`` queries at a time; ``seen_by`` gives a block's keys and their mask."""
    outputs = []
    # The longest block first, so that the others fit into the memory that it frees.
    for start in reversed(range(0, query.shape[2], count)):
        block = slice(start, min(start + count, query.shape[2]))
        keys, mask = seen_by(block)
        outputs.append(run(query[:, :, block], key[:, :, keys], value[:, :, keys], mask)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs[::-1], dim=1)


class LowerRight:
    """A maker of causal masks for a sequence's last queries, all cut from one kept mask.

    The mask for fewer queries or keys is its lower right corner, so that one mask serves all blocks
    of all layers.
    """

    def __init__(self) -> None:
        self._mask: Tensor | None = None

    def of(self, query_len: int, key_len: int, query: Tensor) -> Tensor:
        """Return the causal additive mask ``[query_len, key_len]``, a view of the kept mask."""
        held = self._mask
        fits = held is not None and held.shape[0] >= query_len and held.shape[1] >= key_len
        if held is None or not fits or (held.dtype, held.device) != (query.dtype, query.device):
            held = self._mask = query.new_zeros(query_len, key_len)
            own = torch.ones(query_len, query_len, dtype=torch.bool, device=query.device).triu(1)
            held[:, key_len - query_len :].masked_fill_(own, torch.finfo(query.dtype).min)
        return held[held.shape[0] - query_len :, held.shape[1] - key_len :]


@attrs.frozen(eq=False)
class Blocks:
    """A way to attend block by block: a block of queries sees the keys up to its last token.

    Args:
        implementation: The model's attention implementation; its masks must be tensors.
        keys: ``[batch, 1 or kv_heads, key_len]`` int64 positions, -1 on padding; None if the mask
            is causal, without padding and window.
        window: Number of places a query sees, its own included, or its `Chunk`; None for all places
            up to its own.
    """

    implementation: str
    lower_right: LowerRight
    keys: Tensor | None
    queries: Tensor
    window: int | None = None

    def attend(
        self,
        attend: Attend,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the attention of all queries of a layer, one block of queries at a time."""
        query_len, key_len = query.shape[2], key.shape[2]
        on_gpu, casts = query.device.type == "cuda", _casts(query)
        if self.keys is None and self.implementation == "sdpa" and on_gpu and not casts:
            # The kernels of sdpa know causal order; a mask is made only if no kernel fits.
            bias = causal_lower_right(query_len, key_len)
            output, _ = attend(module, query, key, value, bias, **kwargs)
            return output
        seen = key_len if self.window is None else min(self.window + query_len, key_len)
        heads = 1 if self.keys is None or self.keys.shape[1] == 1 else query.shape[1]
        if self._may_be_joined(attend, query, key, value, kwargs):
            return joined(query, key, value, kwargs.get("scaling"))
        count = min(block_len(query, seen, heads, self.implementation), query_len)

        def seen_by(block: slice) -> tuple[slice, Mask]:
            keys = slice(self._first_key(block), key_len - query_len + block.stop)
            return keys, self._mask(block, keys, query)

        run = functools.partial(attend, module, **kwargs)
        return in_blocks(run, query, key, value, count, seen_by)

    def _may_be_joined(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]
    ) -> bool:
        """True if `joined` gives the same result as the attention module's own function."""
        alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
        graph = torch.is_grad_enabled() and query.requires_grad
        here = query.device.type == "cpu" and self.keys is None
        return (
            _KERNEL is not None
            and here
            and is_plain(attend, how)
            and alike
            and not (graph or _casts(query))
        )

    def _first_key(self, block: slice) -> int:
        """Return the index of the first key that the sliding window shows any query of a block."""
        if self.window is None or self.keys is None:
            return 0
        places = self.queries[:, block]
        if not bool((places >= 0).any()):
            return 0
        first = first_seen(places[places >= 0].min(), self.window)
        near = (self.keys >= first).flatten(0, 1).any(dim=0)
        return int(near.to(torch.uint8).argmax())

    def _mask(self, block: slice, keys: slice, query: Tensor) -> Mask:
        if self.keys is None:
            mask = self.lower_right.of(block.stop - block.start, keys.stop - keys.start, query)
            return mask[None, None]
        # Moved here, since a layer's arguments may move to its device only after positions were
        # made.
        places = self.keys[:, :, keys].to(query.device)
        queries = self.queries[:, block].to(query.device)
        heads = query.shape[1] if places.shape[1] > 1 else 1
        seen = Visibility(places, queries, heads, self.window)
        return seen.mask(self.implementation, query.dtype)


def _casts(query: Tensor) -> bool:
    """True if autocast is on, which converts inputs of public functions but not of this kernel."""
    return torch.is_autocast_enabled(query.device.type)


def joined(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attend without a mask tensor: fully to earlier keys, causally to the queries' own keys.

    A mask, which the CPU kernel reads for every product, makes attention take half as long again.
    The two parts are combined by their sums of exponentials. The last keys are the queries' own.
    """
    assert _KERNEL is not None
    query_len, before = query.shape[2], key.shape[2] - query.shape[2]
    group = query.shape[1] // key.shape[1]
    own_key, own_value = (
        each[:, :, before:].repeat_interleave(group, dim=1) for each in (key, value)
    )
    output, sums = _KERNEL(query, own_key, own_value, 0.0, True, scale=scaling)
    if before:
        # The heads of a group are concatenated, as queries of one head.
        rows = query.reshape(query.shape[0], key.shape[1], group * query_len, -1)
        past, past_sums = _KERNEL(
            rows, key[:, :, :before], value[:, :, :before], 0.0, False, scale=scaling
        )
        share = torch.sigmoid(past_sums.reshape(sums.shape) - sums)[..., None].to(output.dtype)
        output = output + share * (past.reshape(output.shape) - output)
    found: Tensor = output.transpose(1, 2).contiguous()
    return found


def few_go_on(
    propagation: PropagationPolicy, index: int, num_layers: int, seen: int, new_len: int
) -> bool:
    """True if a layer passes on so few tokens that a second run for only these saves time.

    ``seen`` is the number of tokens of the longest row's context, of which ``new_len`` reach the
    layer.
    """
    if propagation.decides_by_content:  # the number is known only from queries and keys
        return True
    rate = propagation.layer_rates(num_layers, context_len=seen)[index + 1]
    return bool(rate * seen <= LARGEST_SHARE * new_len)


@attrs.frozen(eq=False)
class Narrowed:
    """The second run of a layer, which computes only the tokens that the layer passes on.

    If a layer passes on a fifth of its tokens, its attention, output projection and MLP are needed
    for that fifth only. The first run ends when its queries and keys are known, which is all that
    the policy needs. The second run is for the tokens that are passed on, against all keys of the
    first run. The last layer runs in the same way for the tokens whose logits a call asks for. Only
    outputs that nobody reads are left out, so that all others are the same as without narrowing.

    Args:
        keys: ``[batch, kv_heads, key_len, head_dim]``, all that the layer sees.
        values: ``[batch, kv_heads, key_len, head_dim]``.
        slots: ``[batch, passed_len]`` int64, the slots among the keys of the tokens passed on,
            ascending; -1 on padding.
        valid: ``[batch, 1 or kv_heads, key_len]`` bool, False on padding; None without padding.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    valid: Tensor | None
    implementation: str

    def attend(self, attend: Attend, module: nn.Module, query: Tensor, **kwargs: Any) -> Tensor:
        """Compute the attention of the tokens passed on, one block of queries at a time.

        A block sees the keys up to its last token. So about half of a full score matrix is
        computed, and no mask is larger than a block's.
        """
        if self.implementation in FLASH:
            # Flash attention depends on the order of keys, in which the tokens passed on have gaps.
            kernel = AttentionInterface().get_interface("sdpa", attend)
            return attrs.evolve(self, implementation="sdpa").attend(kernel, module, query, **kwargs)
        ends = (self.slots.amax(dim=0) + 1).tolist()
        heads = 1 if self.valid is None or self.valid.shape[1] == 1 else query.shape[1]
        count = block_len(query, self.keys.shape[2], heads, self.implementation)

        def seen_by(block: slice) -> tuple[slice, Mask]:
            seen = ends[block.stop - 1]
            return slice(seen), self._mask(block, seen, query)

        run = functools.partial(attend, module, **kwargs)
        return in_blocks(run, query, self.keys, self.values, count, seen_by)

    def _mask(self, block: slice, seen: int, query: Tensor) -> Mask:
        slots = self.slots[:, block]
        if self.valid is None and slots.shape[1] == 1 and bool((slots == seen - 1).all()):
            return None
        places = torch.arange(seen, device=slots.device).expand(query.shape[0], 1, seen)
        if self.valid is not None:
            places = torch.where(self.valid[:, :, :seen], places, -1)
        return Visibility(places, slots, query.shape[1]).mask(self.implementation, query.dtype)
