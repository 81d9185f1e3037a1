"""CriticalKV (arXiv 2502.03805)."""

import attrs

from kvpolicy.interfaces import KVSelector
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import WindowEvictionMethod
from kvpolicy.policies.selectors.critical import CriticalSelector


@documented
@attrs.frozen
class CriticalKV(WindowEvictionMethod):
    """Keeps half of the budget as SnapKV does, the other half also by values' effect on the output.

    The first half is chosen by the attention of the last tokens, the second half by this attention
    times the norm of each projected value (see `CriticalSelector`). Prefill is complete.

    Args:
        window_size: Tokens of the observation window, at least 1.
        first_share: Share of the budget that attention alone fills, in [0, 1].
        epsilon: Added to the attention in the second half, at least 0.

    Example:
        >>> CriticalKV(first_share=0.25).selector.first_share
        0.25

    Source: CriticalKV (arXiv 2502.03805), as kvpress implements it. It works with any scorer; on
    top of Ada-KV it is ``CriticalSelector(AdaptiveHeadSelector())``.
    """

    paper = "arXiv 2502.03805"

    first_share: float = attrs.field(default=0.5, kw_only=True)
    epsilon: float = attrs.field(default=1e-4, kw_only=True)

    def _selector(self) -> KVSelector:
        return CriticalSelector(
            super()._selector(), first_share=self.first_share, epsilon=self.epsilon
        )
