"""Keeps the tokens of highest saliency for each KV head."""

import attrs
from torch import Tensor

from kvpolicy.attention import group_mean
from kvpolicy.budgets import Budget
from kvpolicy.context import LayerContext
from kvpolicy.host_counts import counts_under, held_counts, known_counts, protected_counts
from kvpolicy.interfaces import KVSelector
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.selectors.budgeted import BudgetedSelector
from kvpolicy.selection import head_budgets, select_between, select_top


@documented
@attrs.frozen
class GQAGroupSelector(BudgetedSelector):
    """Keeps the last tokens and, for each KV head, the most salient others.

    The saliency of a KV head is the mean over the query heads of its group, so that keys and
    values are stored once per KV head. Among equally salient tokens the earlier is kept.

    Example:
        >>> GQAGroupSelector(retention_tokens=512).budget
        Budget(rate=None, tokens=512)

    Source: SnapKV (arXiv 2404.14469), whose code keeps the window and the highest scores per query
    head and stores group times more; the group's mean is FastKV's (arXiv 2502.01068), section 3.
    """

    paper = "arXiv 2502.01068"
    equal_counts = True  # all heads keep equally many tokens

    @property
    def budget(self) -> Budget:
        """The number or fraction of each batch row's tokens that are kept."""
        return self.mean_budget

    def kept_counts(self, context: LayerContext) -> tuple[int, ...] | None:
        """Return how many tokens of each row the budget allows every head to keep."""
        fixed = protected_counts(context, tail=self.window_size, first=self.protect)
        return counts_under(self.budget, context, fixed)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the kept indices ``[batch, kv_heads, kept_len]``; see `KVSelector.select`."""
        assert saliency is not None
        count = self._count_of_unpadded(context)
        if count is not None:
            scores = group_mean(saliency, context.kv_heads)
            return select_between(scores, count, first=self.protect, tail=self.window_size)
        valid, protected = context.valid, self.protected(context)
        budgets = known_counts(self, context) or head_budgets(
            self.budget, context.seen_len, valid=valid, protected=protected
        )
        scores = group_mean(saliency, context.kv_heads)
        return select_top(scores, budgets, valid=valid, protected=protected)

    def _count_of_unpadded(self, context: LayerContext) -> int | None:
        """Return every head's count if no slot is padding and slots show what is protected.

        In a later turn, the first tokens of a context may be gone.
        """
        whole = not self.protect or held_counts(context) == context.seen_len
        own = type(self).protected is KVSelector.protected
        counts = known_counts(self, context) if context._unpadded and whole and own else None
        if counts is None or len(set(counts)) > 1:
            return None
        return counts[0] if self.protect + self.window_size <= counts[0] else None
