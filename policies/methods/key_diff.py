"""KeyDiff (arXiv 2504.15364)."""

import attrs

from kvpolicy.interfaces import Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.scorers.keys import KeyDiffScorer


@documented
@attrs.frozen
class KeyDiff(EvictionMethod):
    """Keeps the keys that resemble the others least; needs no query, prefill is complete.

    Example:
        >>> KeyDiff(retention_tokens=512).selector.budget
        Budget(rate=None, tokens=512)

    Source: KeyDiff: Key Similarity-Based KV Cache Eviction (arXiv 2504.15364). The paper evicts
    block by block while the prompt is read; here the prompt is cut once.
    """

    paper = "arXiv 2504.15364"

    def _scorer(self) -> Scorer:
        return KeyDiffScorer()
