"""Ada-KV (arXiv 2407.11550)."""

import attrs

from kvpolicy.interfaces import KVSelector
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import WindowEvictionMethod
from kvpolicy.policies.selectors.adaptive_head import AdaptiveHeadSelector


@documented
@attrs.frozen
class AdaKV(WindowEvictionMethod):
    """Keeps what the last tokens of the prompt attend to; the KV heads of a layer share its budget.

    The saliency is SnapKV's. Each head keeps a guaranteed number of tokens, and all heads of a
    layer compete for the other places (see `AdaptiveHeadSelector`). Prefill is complete.

    Args:
        retention_rate: Fraction of the context that heads keep on average, in (0, 1].
        window_size: Tokens of the observation window, at least 1.
        floor: Share of the places beside the window that every head fills on its own, in [0, 1];
            with 1 the method is SnapKV.
        retention_tokens: Number of tokens that heads keep on average, at least 1, in place of the
            rate.

    Example:
        >>> AdaKV(retention_tokens=512, floor=0.5).selector.floor
        0.5

    Source: Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
    Inference (arXiv 2407.11550).
    """

    paper = "arXiv 2407.11550"

    floor: float = attrs.field(default=0.2, kw_only=True)

    def _selector(self) -> KVSelector:
        return self._budgeted(AdaptiveHeadSelector, floor=self.floor)
