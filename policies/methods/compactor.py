"""Compactor (arXiv 2507.08143)."""

import attrs

from kvpolicy.checks import check_amount, check_count, check_rate
from kvpolicy.interfaces import Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.scorers.chunk_attention import ChunkAttentionScorer
from kvpolicy.policies.scorers.sketched_leverage import LeverageScorer
from kvpolicy.scorer import SumScorer


@documented
@attrs.frozen
class Compactor(EvictionMethod):
    """Keeps unusual keys, and tokens that their neighbours attend to; works without a question.

    ``blending`` times the leverage of each key (see `LeverageScorer`) plus the attention within
    chunks, both ways (see `ChunkAttentionScorer`). Prefill is complete.

    Args:
        window_size: Last tokens, always kept and left out of the scores, at least 0.
        num_sinks: First tokens of the context, always kept and left out of the scores, at least 0.
        blending: Weight of the leverage, at least 0; None for ``1 - retention_rate``, and for 0.35
            where the budget is a number of tokens.
        chunk_size: Tokens of a chunk, at least 1.
        sketch_size: Columns of the random projection of keys, at least 1.
        seed: Seed of the projection, at least 0.
        protect: First tokens of the context that are always kept, at least 0; where more than
            ``num_sinks``.

    Example:
        >>> Compactor(0.2).scorer.weights
        (0.8, 1.0)

    Source: Compactor (arXiv 2507.08143), as kvpress implements it. The paper computes a weight for
    each context, by a rule that we could not find; the default is kvpress's.
    """

    paper = "arXiv 2507.08143"

    window_size: int = attrs.field(default=4, kw_only=True)
    num_sinks: int = attrs.field(default=8, kw_only=True)
    blending: float | None = attrs.field(default=None, kw_only=True)
    chunk_size: int = attrs.field(default=256, kw_only=True)
    sketch_size: int = attrs.field(default=48, kw_only=True)
    seed: int = attrs.field(default=0, kw_only=True)

    def _scorer(self) -> Scorer:
        if self.blending is not None:
            check_amount("blending", self.blending)
        leverage = LeverageScorer(
            num_sinks=self.num_sinks,
            window_size=self.window_size,
            sketch_size=self.sketch_size,
            seed=self.seed,
        )
        attention = ChunkAttentionScorer(
            num_sinks=self.num_sinks, window_size=self.window_size, chunk_size=self.chunk_size
        )
        return SumScorer([leverage, attention], weights=[self._weight(), 1.0])

    def _weight(self) -> float:
        if self.blending is not None:
            return self.blending
        if self.retention_tokens is not None or self.retention_rate is None:
            return 0.35
        return 1 - check_rate("retention_rate", self.retention_rate)

    @property
    def _first(self) -> int:
        return max(check_count("protect", self.protect), self.num_sinks)
