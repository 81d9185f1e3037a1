"""Keeps the first tokens of a context beyond the budget."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.budgets import Budget
from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.host_counts import held_counts, known_counts
from kvpolicy.interfaces import KVSelector
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
from kvpolicy.policies.selectors.wrapping import WrappingSelector
from kvpolicy.selection import compress


@attrs.frozen
class FirstTokensWholeSelector(WrappingSelector):
    """Keeps the context's first tokens; another selector chooses among the later ones.

    The wrapped selector sees only the later tokens, at their own positions, as if there were no
    others: its rate refers to these tokens, and its number of tokens is added to the first ones.
    (``protect`` of other selectors keeps first tokens too, but counts them in the budget.)

    Args:
        selector: Chooses among the later tokens.
        whole_tokens: First tokens of the context that are kept, such as those of a system prompt,
            at least 0.

    Raises:
        TypeError: ``selector`` is not a `KVSelector`, or ``whole_tokens`` not an int.
        ValueError: ``whole_tokens`` is below 0.

    Example:
        >>> selector = FirstTokensWholeSelector(GQAGroupSelector(0.1), whole_tokens=100)
        >>> selector.kept_rates(2, context_len=1000)
        [0.19, 0.19]

    Source: KVzip (arXiv 2505.23416), whose code keeps the system prompt in this way.
    """

    paper = "arXiv 2505.23416"

    selector: KVSelector = attrs.field(default=GQAGroupSelector())
    whole_tokens: int = attrs.field(default=4, kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_count("whole_tokens", self.whole_tokens)

    @property
    def protected_first(self) -> int:
        """The number of the context's first tokens that are always kept."""
        return max(self.whole_tokens, self.selector.protected_first)

    @property
    def budget(self) -> Budget | None:
        """The wrapped selector's budget; None if it does not count the first tokens also kept."""
        return None if self.whole_tokens else self.selector.budget

    @property
    def decides_together(self) -> bool:
        """True if the wrapped selector chooses for all layers at once."""
        return self.selector.decides_together

    @property
    def equal_counts(self) -> bool:
        """True if all heads of all layers keep equally many tokens of a batch row.

        Otherwise heads with equally many protected tokens may hold different numbers of first ones.
        """
        own = self.selector.protected_first <= self.whole_tokens or not self.whole_tokens
        return own and self.selector.equal_counts

    def protected(self, context: LayerContext) -> Tensor:
        """Mark the tokens always kept: the first, and the wrapped selector's protected ones."""
        first = context.is_first(self.whole_tokens)
        return first | self.selector.protected(self._behind(context))

    def kept_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return the fraction of tokens that each layer keeps, with the first tokens counted."""
        if context_len is None:
            return self.selector.kept_rates(num_layers)
        first = min(self.whole_tokens, check_count("context_len", context_len, minimum=1))
        if first == context_len:
            return [1.0] * check_count("num_layers", num_layers, minimum=1)
        behind = context_len - first
        rates = self.selector.kept_rates(num_layers, behind)
        return [(first + rate * behind) / context_len for rate in rates]

    def kept_counts(self, context: LayerContext) -> tuple[int, ...] | None:
        """Return how many tokens of each row are kept, with the first tokens counted."""
        behind = known_counts(self.selector, self._behind(context))
        if behind is None:
            return None
        # The layer holds the whole context; otherwise its later tokens would be unknown.
        return tuple(
            min(seen, self.whole_tokens) + count
            for seen, count in zip(context.seen_len, behind, strict=True)
        )

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the kept indices ``[batch, kv_heads, kept_len]``; see `KVSelector.select`."""
        return self._with_first(self.selector.select(saliency, self._behind(context)), context)

    def select_together(
        self, saliencies: Sequence[Tensor], contexts: Sequence[LayerContext]
    ) -> list[Tensor]:
        """Return the tokens that every layer keeps; see `KVSelector.select_together`."""
        found = self.selector.select_together(saliencies, [self._behind(each) for each in contexts])
        return [self._with_first(*each) for each in zip(found, contexts, strict=True)]

    def _behind(self, context: LayerContext) -> LayerContext:
        """Return a copy of the context where the first tokens are marked as padding."""
        seen_len = tuple(max(each - self.whole_tokens, 0) for each in context.seen_len)
        # If some tokens are not held, some of the first may be missing too. A selector that
        # protects first tokens would then protect later ones, since it knows only their number.
        whole = held_counts(context) == context.seen_len and not self.selector.protected_first
        return attrs.evolve(
            context,
            positions=context.positions.masked_fill(context.is_first(self.whole_tokens), -1),
            new_valid=context.new_valid & ~context.is_new_first(self.whole_tokens),
            seen_len=seen_len,
            held_len=seen_len if whole else None,
        )

    def _with_first(self, kept: Tensor, context: LayerContext) -> Tensor:
        """Add the first tokens to the indices that the wrapped selector chose."""
        first = context.is_first(self.whole_tokens)
        found = torch.cat([compress(first, first.shape[-1]), kept], dim=-1).sort(dim=-1).values
        counts = known_counts(self, context)
        most = max(counts) if counts is not None else int((found >= 0).sum(dim=-1).max())
        return found[..., found.shape[-1] - most :]
