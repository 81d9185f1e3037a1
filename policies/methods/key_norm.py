"""KeyNorm: keeps keys of small norm (arXiv 2406.11430)."""

import attrs

from kvpolicy.interfaces import Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.scorers.keys import KeyNormScorer


@documented
@attrs.frozen
class KeyNorm(EvictionMethod):
    """Keeps the keys of smallest norm; needs no query, prefill is complete.

    Example:
        >>> KeyNorm(retention_tokens=512).selector.budget
        Budget(rate=None, tokens=512)

    Source: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression
    (arXiv 2406.11430). The window is ours, as in the other methods, for the sake of comparison.
    """

    paper = "arXiv 2406.11430"

    def _scorer(self) -> Scorer:
        return KeyNormScorer()
