"""TOVA (arXiv 2401.06104)."""

import attrs

from kvpolicy.interfaces import Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.scorers.last_query import LastQueryScorer


@documented
@attrs.frozen
class TOVA(EvictionMethod):
    """Keeps what the last token of the prompt attends to; prefill is complete.

    Example:
        >>> TOVA(retention_tokens=512).selector.budget
        Budget(rate=None, tokens=512)

    Source: Transformers are Multi-State RNNs (arXiv 2401.06104). The paper averages over all heads
    and evicts at every step; here the mean is over each KV group, and the prompt is cut once. With
    ``decoding`` one token is dropped at every step. The last token is always kept.
    """

    paper = "arXiv 2401.06104"
    every = 1

    window_size: int = attrs.field(default=1, kw_only=True)

    def _scorer(self) -> Scorer:
        return LastQueryScorer()
