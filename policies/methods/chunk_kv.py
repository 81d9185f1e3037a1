"""ChunkKV (arXiv 2502.00299)."""

import attrs

from kvpolicy.interfaces import Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.scorers.chunks import ChunkMeanScorer
from kvpolicy.policies.scorers.window import WindowMaxPoolScorer


@documented
@attrs.frozen
class ChunkKV(EvictionMethod):
    """Keeps runs of neighbours that the last tokens of the prompt attend to; prefill is complete.

    Every layer keeps the observation window and, of the chunks before it, those with the highest
    window saliency on average, the same for all KV heads (see `ChunkMeanScorer`).

    Args:
        window_size: Tokens of the observation window, at least 1.
        chunk_size: Tokens of a chunk, at least 1.

    Example:
        >>> ChunkKV(retention_rate=0.2, chunk_size=20).scorer.chunk_size
        20

    Source: ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM
    Inference (arXiv 2502.00299). The budget is a number of tokens here, so that one chunk may be
    cut; its reuse of a layer's choice in the next layers is left out.
    """

    paper = "arXiv 2502.00299"

    kernel_size: int = attrs.field(default=7, kw_only=True)
    chunk_size: int = attrs.field(default=10, kw_only=True)

    def _scorer(self) -> Scorer:
        window = WindowMaxPoolScorer(self.window_size, kernel_size=self.kernel_size)
        return ChunkMeanScorer(window, chunk_size=self.chunk_size)
