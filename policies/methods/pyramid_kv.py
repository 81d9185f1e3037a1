"""PyramidKV (arXiv 2406.02069)."""

import attrs

from kvpolicy.interfaces import KVSelector
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import WindowEvictionMethod
from kvpolicy.policies.selectors.pyramid import PyramidSelector


@documented
@attrs.frozen
class PyramidKV(WindowEvictionMethod):
    """Keeps what the prompt's last tokens attend to, and more in early layers than in late ones.

    SnapKV's saliency under budgets that fall with depth and have the same total (see
    `PyramidSelector`); prefill is complete.

    Args:
        retention_rate: Fraction of the context that layers keep on average, in (0, 1].
        window_size: Tokens of the observation window, at least 1.
        beta: How steeply the budgets fall, at least 1: the last layer keeps about ``1 / beta`` of
            the mean beside the window; with 1 all layers keep equally many.
        retention_tokens: Number of tokens that layers keep on average, at least 1, in place of the
            rate.

    Example:
        >>> rates = PyramidKV(retention_rate=0.1, beta=2).selector.kept_rates(num_layers=3)
        >>> [round(rate, 3) for rate in rates]
        [0.15, 0.1, 0.05]

    Source: PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling
    (arXiv 2406.02069). Its code selects and stores tokens per query head, this class per KV head.
    """

    paper = "arXiv 2406.02069"

    beta: int = attrs.field(default=20, kw_only=True)

    def _selector(self) -> KVSelector:
        return self._budgeted(PyramidSelector, beta=self.beta)
