"""Keeps the same tokens in all heads of all layers."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import group_mean, neighbour_mean, standardized
from kvpolicy.checks import check_kernel_size
from kvpolicy.context import LayerContext
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
from kvpolicy.selection import compress, head_budgets, select_top


@documented
@attrs.frozen
class SameTokensSelector(GQAGroupSelector):
    """Keeps the same tokens in all heads of all layers: those that stand out in any of them.

    Layers choose after all of them were scored. The saliency of a KV head is the mean over the
    query heads of its group, standardized to mean 0 and deviation 1 over the head's tokens that are
    not protected. A token's ranking is its largest in any head of any layer that holds it, and then
    the mean over it and its neighbours, where protected tokens and what lies outside count as 0.
    Every head keeps the protected tokens and the highest others. So all heads keep equally many
    tokens, the same ones where they hold the same, as after one prompt without a drop.

    For documents that are served with the same number of slots in all heads, such as in vLLM:
    heads that choose on their own lose what only few heads look for.

    Args:
        kernel_size: Width, odd, of the mean over neighbours; 1 for none.

    Example:
        >>> selector = SameTokensSelector(0.2)
        >>> selector.decides_together, selector.equal_counts
        (True, True)

    Source: This project.
    """

    paper = ""
    decides_together = True  # a token's ranking is its largest in any layer

    kernel_size: int = attrs.field(default=7, kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_kernel_size(self.kernel_size)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Choose tokens as if this layer were the model's only one."""
        assert saliency is not None
        return self.select_together([saliency], [context])[0]

    def select_together(
        self, saliencies: Sequence[Tensor], contexts: Sequence[LayerContext]
    ) -> list[Tensor]:
        """Return the tokens that every layer keeps; see `KVSelector.select_together`."""
        ranking = self._ranking(saliencies, contexts)
        found = []
        for context in contexts:
            valid, protected = context.valid, self.protected(context)
            budgets = head_budgets(self.budget, context.seen_len, valid=valid, protected=protected)
            places = context.positions.clamp(min=0)
            scores = ranking.to(places.device)[:, None].expand(-1, places.shape[1], -1)
            found.append(
                select_top(scores.gather(2, places), budgets, valid=valid, protected=protected)
            )
        return found

    def _ranking(self, saliencies: Sequence[Tensor], contexts: Sequence[LayerContext]) -> Tensor:
        """Return the ranking of the token at each position, float32 ``[batch, longest]``."""
        device = contexts[0].keys.device
        # One place more, for padding.
        size = max(int(context.positions.max()) for context in contexts) + 2
        largest = torch.full((contexts[0].batch, size), -torch.inf, device=device)
        for saliency, context in zip(saliencies, contexts, strict=True):
            free = context.valid & ~self.protected(context)
            scores = standardized(group_mean(saliency, context.kv_heads), free)
            parts = (scores.masked_fill(~free, 0.0), context.positions, context.valid)
            scores, positions, valid = (
                context.layer.heads.gather(part).to(device).flatten(1) for part in parts
            )
            largest.scatter_reduce_(1, positions.where(valid, size - 1), scores, "amax")
        largest[:, -1] = -torch.inf
        # Neighbours are the tokens that are left.
        slots = compress(largest.isfinite(), size)
        ordered = largest.gather(1, slots.clamp(min=0)).masked_fill(slots < 0, 0.0)
        places = slots.where(slots >= 0, size - 1)
        return largest.scatter(1, places, neighbour_mean(ordered, self.kernel_size))
