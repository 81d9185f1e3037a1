"""Run a layer for some of its tokens only, once the policy knows which, from queries and keys.

If a layer passes on a fifth of its tokens, its attention, output projection and MLP are needed for
that fifth only. The layer runs twice. The first run ends when its queries and keys are known, which
is all that the policy needs. The second run is for the tokens that are passed on, against all keys
of the first run. The last layer runs in the same way for the tokens whose logits a call asks for.
Only outputs that nobody reads are left out, so that all others are the same as without narrowing.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kvpolicy.integrations.transformers.forward.blocks import block_len, in_blocks
from kvpolicy.integrations.transformers.model.masks import FLASH, Mask, Visibility
from kvpolicy.integrations.transformers.model.routing import Attend
from kvpolicy.interfaces import PropagationPolicy

# A layer is narrowed if it passes on at most this share of its tokens, since its projections run a
# second time for these.
LARGEST_SHARE = 0.75


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
