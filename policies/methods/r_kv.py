"""R-KV (arXiv 2505.24133)."""

import attrs

from kvpolicy.interfaces import Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.scorers.redundancy import RedundancyScorer


@documented
@attrs.frozen
class RKV(EvictionMethod):
    """Keeps what the last tokens attend to; of tokens with similar keys, the newest.

    Made for reasoning models, whose long answers repeat themselves. ``decoding`` bounds an answer
    by the same rule as the prompt (see `RedundancyScorer`). Prefill is complete.

    Args:
        window_size: Tokens of the observation window, at least 1.
        importance: Weight of attention against redundancy, in [0, 1].

    Example:
        >>> RKV(retention_tokens=1024, decoding=True).decoding.every
        128

    Source: R-KV: Redundancy-aware KV Cache Compression for Reasoning Models (arXiv 2505.24133),
    whose code has 0.07 for ``importance``, its description 0.1. A prompt of at least the budget is
    cut once it is read, as in its run script; its code for servers waits for 128 more tokens.
    """

    paper = "arXiv 2505.24133"

    kernel_size: int = attrs.field(default=7, kw_only=True)
    importance: float = attrs.field(default=0.1, kw_only=True)

    def _scorer(self) -> Scorer:
        return RedundancyScorer(
            window_size=self.window_size, kernel_size=self.kernel_size, importance=self.importance
        )
