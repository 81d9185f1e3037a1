"""Keeps all tokens in the first layers."""

import attrs
from torch import Tensor

from kvpolicy.budgets import Budget
from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.host_counts import held_counts, known_counts
from kvpolicy.interfaces import KVSelector
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
from kvpolicy.policies.selectors.keep_all import KeepAllSelector
from kvpolicy.policies.selectors.wrapping import WrappingSelector


@attrs.frozen
class FirstLayersWholeSelector(WrappingSelector):
    """Keeps all tokens in the first layers; another selector chooses in the later ones.

    Args:
        selector: Chooses in the other layers.
        whole_layers: First layers that keep everything, at least 0.

    Raises:
        TypeError: ``selector`` is not a `KVSelector`, or ``whole_layers`` not an int.
        ValueError: ``whole_layers`` is below 0.

    Example:
        >>> FirstLayersWholeSelector(GQAGroupSelector(0.1), whole_layers=2).kept_rates(4)
        [1.0, 1.0, 0.1, 0.1]

    Source: CLAA (arXiv 2602.16054).
    """

    paper = "arXiv 2602.16054"

    selector: KVSelector = attrs.field(default=GQAGroupSelector())
    whole_layers: int = attrs.field(default=4, kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_count("whole_layers", self.whole_layers)

    @property
    def budget(self) -> Budget | None:
        """The wrapped selector's budget; None if it does not hold for the first layers."""
        return None if self.whole_layers else self.selector.budget

    @property
    def equal_counts(self) -> bool:
        """True if all heads of all layers keep equally many tokens of a batch row."""
        return self.whole_layers == 0 and self.selector.equal_counts

    @property
    def is_bounded(self) -> bool:
        """True if the number of tokens kept does not grow with the context."""
        return self.whole_layers == 0 and self.selector.is_bounded

    def protected(self, context: LayerContext) -> Tensor:
        """Mark the tokens that are always kept: all of them in the first layers."""
        return context.valid if self._is_whole(context) else self.selector.protected(context)

    def kept_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return the fraction of tokens that each layer keeps: 1 in the first layers, then less."""
        rates = self.selector.kept_rates(num_layers, context_len)
        return [1.0 if layer < self.whole_layers else rate for layer, rate in enumerate(rates)]

    def around(self, selector: KVSelector) -> KVSelector:
        """Return a copy that uses the given selector in all layers, to evict while decoding."""
        return attrs.evolve(self, selector=selector, whole_layers=0)

    def kept_counts(self, context: LayerContext) -> tuple[int, ...] | None:
        """Return how many tokens of each row this layer keeps: all of them in the first layers."""
        whole = self._is_whole(context)
        return held_counts(context) if whole else known_counts(self.selector, context)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the kept indices ``[batch, kv_heads, kept_len]``; see `KVSelector.select`."""
        if not self._is_whole(context):
            return self.selector.select(saliency, context)
        return KeepAllSelector().select(saliency, context)

    def _is_whole(self, context: LayerContext) -> bool:
        return context.layer_idx < self.whole_layers
