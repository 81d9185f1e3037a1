"""Keeps the first and the most recent tokens."""

import functools

import attrs
import torch
from torch import Tensor

from kvpolicy.budgets import Budget, DefaultRate
from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.host_counts import counts_under, held_counts, known_counts, protected_counts
from kvpolicy.interfaces import KVSelector
from kvpolicy.policies.documentation import documented
from kvpolicy.selection import head_budgets, select_top


@documented
@attrs.frozen
class SinkAndRecentSelector(KVSelector):
    """Keeps the context's first tokens (attention sinks) and the most recent ones.

    Args:
        num_sinks: First tokens that are always kept, at least 0: the first that the layer holds.
        protect: First tokens of the row's context that are always kept, at least 0. Differs from
            ``num_sinks`` only where some of them did not reach the layer.

    Example:
        >>> SinkAndRecentSelector(num_sinks=0, retention_rate=0.5).needs_saliency
        False

    Source: StreamingLLM (arXiv 2309.17453), section 3. Tokens keep their original rotary
    positions here, where the paper renumbers them within the cache: see ``gapless`` of
    `CachePolicy`.
    """

    paper = "arXiv 2309.17453"
    needs_saliency = False  # only a token's position decides
    equal_counts = True  # all heads keep equally many tokens

    retention_rate: float | None = DefaultRate(0.1)
    num_sinks: int = attrs.field(default=4, kw_only=True)
    retention_tokens: int | None = attrs.field(default=None, kw_only=True)
    protect: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("num_sinks", self.num_sinks)
        check_count("protect", self.protect)
        object.__setattr__(self, "retention_rate", self.budget.rate)

    @property
    def protected_first(self) -> int:
        """The number of first tokens always kept: the sinks, or ``protect`` if larger."""
        return max(self.num_sinks, self.protect)

    @functools.cached_property
    def budget(self) -> Budget:
        """The number or fraction of each batch row's tokens that are kept."""
        return Budget(self.retention_rate, self.retention_tokens)

    def protected(self, context: LayerContext) -> Tensor:
        """Mark the tokens at the context's first positions, which are always kept."""
        sinks = context.valid & (context.valid.cumsum(dim=-1) <= self.num_sinks)
        return sinks | super().protected(context)

    def kept_counts(self, context: LayerContext) -> tuple[int, ...] | None:
        """Return how many tokens of each row the budget allows every head to keep."""
        # Sinks are the first tokens held, so their number does not depend on the others.
        more = self.protected_first - self.num_sinks
        fixed = protected_counts(context, tail=self.num_sinks, first=more)
        return counts_under(self.budget, context, fixed)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the kept indices ``[batch, kv_heads, kept_len]``; see `KVSelector.select`."""
        counts = known_counts(self, context)
        if counts is not None and self._by_slots(context, counts):
            first = min(self.protected_first, counts[0])
            device, length = context.keys.device, context.key_len
            recent = torch.arange(length - counts[0] + first, length, device=device)
            kept = torch.cat([torch.arange(first, device=device), recent])
            return kept.expand(context.batch, context.kv_heads, -1)
        valid, protected = context.valid, self.protected(context)
        budgets = counts or head_budgets(
            self.budget, context.seen_len, valid=valid, protected=protected
        )
        recency = torch.arange(context.key_len, dtype=torch.float64, device=valid.device)
        return select_top(recency.expand(valid.shape), budgets, valid=valid, protected=protected)

    def _by_slots(self, context: LayerContext, counts: tuple[int, ...]) -> bool:
        """True if slots alone decide: there is no padding, and no protected token was evicted."""
        held = self.protect <= self.num_sinks or held_counts(context) == context.seen_len
        own = type(self).protected is SinkAndRecentSelector.protected
        return context._unpadded and held and own and len(set(counts)) == 1
