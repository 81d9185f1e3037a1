"""Expected Attention (arXiv 2510.00636)."""

import attrs

from kvpolicy.checks import check_count
from kvpolicy.interfaces import Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.scorers.expected import ExpectedAttentionScorer


@documented
@attrs.frozen
class ExpectedAttention(EvictionMethod):
    """Keeps the tokens that future queries will probably attend to, estimated from past queries.

    No question is needed at the prompt's end: the mean and covariance of the prompt's queries,
    rotated to future positions, predict the attention (see `ExpectedAttentionScorer`). Prefill is
    complete.

    Args:
        num_sinks: First tokens of the context, always kept and left out of the statistics, at
            least 0.
        future_len: Number of future positions that are averaged over, at least 1.
        epsilon: Added to the expected attention before it is multiplied by the norm of the value,
            at least 0.
        protect: First tokens of the context that are always kept, at least 0; where more than
            ``num_sinks``.

    Example:
        >>> ExpectedAttention(retention_tokens=512).selector.protect
        4

    Source: Expected Attention (arXiv 2510.00636), as kvpress implements it. In kvpress's
    leaderboard heads keep different numbers of tokens:
    ``CachePolicy(ExpectedAttentionScorer(epsilon=0.01), AdaptiveHeadSelector(protect=4),
    PassAllPropagation())``.
    """

    paper = "arXiv 2510.00636"

    num_sinks: int = attrs.field(default=4, kw_only=True)
    future_len: int = attrs.field(default=512, kw_only=True)
    epsilon: float = attrs.field(default=0.0, kw_only=True)

    def _scorer(self) -> Scorer:
        return ExpectedAttentionScorer(
            num_sinks=self.num_sinks, future_len=self.future_len, epsilon=self.epsilon
        )

    @property
    def _first(self) -> int:
        return max(check_count("protect", self.protect), self.num_sinks)
