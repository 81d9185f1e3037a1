"""Splits a layer's budget unequally over its KV heads."""

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.attention import group_mean
from kvpolicy.checks import check_rate
from kvpolicy.context import LayerContext
from kvpolicy.host_counts import held_counts, on_device
from kvpolicy.interfaces import KVSelector
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.selectors.budgeted import BudgetedSelector
from kvpolicy.selection import compress, ranks


@documented
@attrs.frozen
class AdaptiveHeadSelector(BudgetedSelector):
    """Splits a layer's budget over its KV heads: those with spread-out attention keep more.

    With ``c`` tokens in the mean budget of a row, ``p`` of them protected and ``f = c - p``, each
    KV head first takes its own ``g = int(f * floor)`` most salient tokens beside the protected
    ones. The other ``kv_heads * (f - g)`` places of the layer go to the most salient tokens left in
    any head; of equals, to the lower head and then to the earlier token. The saliency of a KV head
    is the mean over the query heads of its group. All heads together keep exactly ``kv_heads * c``
    tokens if all tokens reach the layer. A head with fewer than ``g`` such tokens leaves the rest
    of its places unused.

    Args:
        retention_rate: Fraction of the context that heads keep on average, in (0, 1].
        retention_tokens: Number of tokens that heads keep on average, at least 1, in place of the
            rate.
        floor: Share of the free places that every head fills by itself, in [0, 1]; 1 is the same
            for every head.

    Example:
        >>> AdaptiveHeadSelector(retention_tokens=512).mean_budget
        Budget(rate=None, tokens=512)

    Source: Ada-KV (arXiv 2407.11550), section 4. The published code ranks all tokens of all heads
    together and then moves every head's number towards the mean, so that rounding leaves the total
    near the budget; here a head's floor is set aside first and the total is exact.
    """

    paper = "arXiv 2407.11550"
    unequal_heads = True  # each head gets its own share of the layer's budget

    floor: float = attrs.field(default=0.2, kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_rate("floor", self.floor, zero=True)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the kept indices ``[batch, kv_heads, kept_len]``; see `KVSelector.select`.

        Heads that keep fewer than others are filled with -1 on the left.
        """
        assert saliency is not None
        heads = context.layer.heads
        alike = len(set(context.seen_len)) == 1 and heads.shares == 1
        free = self.protect + self.window_size < context.key_len
        if alike and free and self._protects_by_slot(context):
            return self._selected(group_mean(saliency, context.kv_heads), context)
        scores = heads.gather(group_mean(saliency, context.kv_heads))
        valid = heads.gather(context.valid)
        protected = heads.gather(self.protected(context))
        own, shared = self._places(context.seen_len, protected)
        candidates = valid & ~protected
        taken = candidates & (ranks(scores, candidates) < own[:, None, None])
        rest = candidates & ~taken
        places = ranks(scores.flatten(1), rest.flatten(1)).view_as(rest)  # over all heads
        chosen = protected | taken | (rest & (places < shared[:, None, None]))
        first = heads.share * context.kv_heads
        here = chosen[:, first : first + context.kv_heads, chosen.shape[2] - context.key_len :]
        return compress(here, int(here.sum(dim=-1).max()))

    def _protects_by_slot(self, context: LayerContext) -> bool:
        """True if there is no padding, and the protected tokens are the first and the last slots.

        In a later turn, the first tokens of a context may be gone.
        """
        whole = not self.protect or held_counts(context) == context.seen_len
        return context._unpadded and whole and type(self).protected is KVSelector.protected

    def _places(self, seen_len: tuple[int, ...], protected: Tensor) -> tuple[Tensor, Tensor]:
        """Split each row's budget into a fixed part per head and a part heads compete for."""
        fixed = protected.sum(dim=-1).amax(dim=-1)
        mean = on_device([self._free(seen, 0) for seen in seen_len], protected.device)
        free = mean.maximum(fixed) - fixed
        own = (free.double() * self.floor).long()
        return own, protected.shape[1] * (free - own)

    def _selected(self, scores: Tensor, context: LayerContext) -> Tensor:
        """Select as `select` does, for rows of one length without padding."""
        fixed, heads = self.protect + self.window_size, context.kv_heads
        free = max(self._free(context.seen_len[0], 0), fixed) - fixed
        own = int(free * self.floor)
        last = context.key_len - self.window_size
        lowest = torch.finfo(scores.dtype).min
        middle = scores[..., self.protect : last].nan_to_num(nan=lowest, neginf=lowest)
        chosen = torch.zeros_like(middle, dtype=torch.bool)
        if own:
            order = middle.argsort(dim=-1, descending=True, stable=True)[..., :own]
            chosen.scatter_(-1, order, True)
            middle = middle.masked_fill(chosen, -torch.inf)
        order = middle.flatten(1).argsort(dim=-1, descending=True, stable=True)
        shared = min(heads * (free - own), middle.shape[-1] * heads - heads * own)
        chosen.view(len(chosen), -1).scatter_(-1, order[:, : max(shared, 0)], True)
        chosen = pad(chosen, (self.protect, self.window_size), value=True)
        return compress(chosen, int(chosen.sum(dim=-1).max()))
