"""H2O (arXiv 2306.14048)."""

import attrs

from kvpolicy.interfaces import Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.scorers.accumulated import AccumulatedAttentionScorer


@documented
@attrs.frozen
class H2O(EvictionMethod):
    """Keeps the heavy hitters: tokens with the most attention in total; prefill is complete.

    Every layer keeps the last tokens and, per KV head, those with the highest sum of the causal
    attention of all queries (see `AccumulatedAttentionScorer`), averaged over the KV group.

    Example:
        >>> H2O(retention_rate=0.2).num_queries is None
        True

    Source: H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models
    (arXiv 2306.14048). The paper evicts at every step, keeping as many recent tokens as heavy
    hitters, and its code chooses per query head; here, as in FastKV's comparison, the prompt is cut
    once, the window is small, and the choice is one per KV head. With ``decoding`` the sums
    continue over the answer's queries, and layers choose by them after every 128 tokens, so that
    they hold at least what a choice at every step would.
    """

    paper = "arXiv 2306.14048"

    def _scorer(self) -> Scorer:
        return AccumulatedAttentionScorer()
