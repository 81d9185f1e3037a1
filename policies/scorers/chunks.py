"""Gives neighbouring tokens one saliency, so that they are kept or evicted together."""

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer
from kvpolicy.policies.scorers.window import WindowMaxPoolScorer
from kvpolicy.policies.scorers.wrapping import WrappingScorer


@attrs.frozen
class ChunkMeanScorer(WrappingScorer):
    """Averages another scorer's saliency over chunks of consecutive tokens and over all heads.

    ``saliency'[h, j]`` is the mean of ``saliency[h', i]`` over all heads ``h'`` of the layer and
    the tokens ``i`` with ``position_i // chunk_size = position_j // chunk_size`` that a head
    holds: chunks are counted from the first token of each row, in every turn. All heads get the
    same saliency, in float32. Tokens that the scorer leaves unscored do not count in a mean, and
    get 0.

    Args:
        scorer: Gives the saliency.
        chunk_size: Tokens of a chunk, at least 1.

    Raises:
        TypeError: ``scorer`` is not a `Scorer`, or ``chunk_size`` not an int.
        ValueError: ``chunk_size`` is below 1.

    Example:
        >>> ChunkMeanScorer(chunk_size=20).num_queries
        8

    Source: ChunkKV (arXiv 2502.00299). It keeps whole chunks; a selector here keeps a number of
    tokens, so that the last chunk may be cut to its first tokens. In kvpress chunks have 20 tokens,
    the first row's choice serves for all rows, and the observation window's own score, higher than
    all others, counts in the chunk in which the window begins.
    """

    paper = "arXiv 2502.00299"

    scorer: Scorer = attrs.field(default=WindowMaxPoolScorer())
    chunk_size: int = attrs.field(default=10, kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_count("chunk_size", self.chunk_size, minimum=1)

    def _changed(self, saliency: Tensor, context: LayerContext) -> Tensor:
        group = saliency.shape[1] // context.kv_heads
        scored = context.valid & ~context.is_tail(self.unscored_tail)
        chunks = context.positions.clamp(min=0) // self.chunk_size
        # By position, not by slot, since heads may hold different tokens after earlier choices. The
        # number of chunks is the same in every process that has a share of the heads.
        count = -(-max(context.seen_len) // self.chunk_size)
        shown = saliency.masked_fill(~scored.repeat_interleave(group, dim=1), 0.0)
        sums = context.layer.heads.mean(_sums(shown, chunks.repeat_interleave(group, dim=1), count))
        held = context.layer.heads.mean(_sums(scored.to(shown.dtype), chunks, count))
        means = sums / held.masked_fill(held == 0, 1.0)
        of_heads = means[:, None].expand(-1, context.kv_heads, -1)
        return of_heads.gather(-1, chunks).masked_fill(~scored, 0.0)


def _sums(numbers: Tensor, chunks: Tensor, count: int) -> Tensor:
    """Sum saliency ``[batch, heads, key_len]`` over each chunk's tokens, per batch row and head."""
    sums = torch.zeros(*numbers.shape[:2], count, dtype=numbers.dtype, device=numbers.device)
    return sums.scatter_add_(-1, chunks, numbers)
