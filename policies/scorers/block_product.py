"""Scores blocks of tokens by raw products of the last queries with the blocks' keys."""

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import query_key_products
from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


@attrs.frozen
class BlockProductScorer(Scorer):
    """Scores tokens by dot products of the last queries with the mean keys of their block.

    Keys are divided, by position, into units of ``chunk_size`` tokens, and ``block_chunks`` units
    make a block. ``saliency[j] = max over units m of the block of j of mean over query heads h of
    |q_h . k_hm|``, with ``q_h`` the mean of the last queries and ``k_hm`` the mean of the unit's
    keys that the head holds; in float32, unscaled and without softmax. The same for all heads and
    for all tokens of a block.

    Args:
        window_size: Last tokens whose queries are averaged, at least 1.
        chunk_size: Tokens of a unit, at least 1.
        block_chunks: Units of a block, at least 1.

    Raises:
        TypeError: An argument is not an int.
        ValueError: An argument is out of its range.

    Example:
        >>> BlockProductScorer().num_queries
        4

    Source: SlimInfer (arXiv 2508.06447), as described by others; its code was not looked at.
    """

    paper = "arXiv 2508.06447"

    window_size: int = attrs.field(default=4, kw_only=True)
    chunk_size: int = attrs.field(default=8, kw_only=True)
    block_chunks: int = attrs.field(default=8, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("window_size", self.window_size, minimum=1)
        check_count("chunk_size", self.chunk_size, minimum=1)
        check_count("block_chunks", self.block_chunks, minimum=1)

    @property
    def num_queries(self) -> int:
        """The number of last queries whose mean is compared with keys."""
        return self.window_size

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        seen = context.query_valid[:, None, :, None]
        queries = context.queries.float().masked_fill(~seen, 0.0).sum(dim=2, keepdim=True)
        queries = queries / seen.sum(dim=2, keepdim=True).clamp(min=1)
        products = query_key_products(queries, context.keys)[:, :, 0]
        # The same number of blocks in every process that has a share of the heads.
        block_len = self.chunk_size * self.block_chunks
        blocks = -(-max(context.seen_len) // block_len)
        units = _unit_means(products, context, self.chunk_size, blocks * self.block_chunks)
        strength = context.layer.heads.mean(units.abs())
        of_blocks = strength.reshape(-1, blocks, self.block_chunks).amax(dim=2)
        at = context.positions.clamp(min=0) // block_len
        return of_blocks[:, None].expand(-1, context.kv_heads, -1).gather(-1, at)


def _unit_means(products: Tensor, context: LayerContext, size: int, count: int) -> Tensor:
    """Average the query-key products over each run of ``size`` consecutive tokens."""
    group = context.query_heads // context.kv_heads
    at = (context.positions.clamp(min=0) // size).repeat_interleave(group, dim=1)
    real = context.valid.repeat_interleave(group, dim=1).to(products.dtype)
    sums = torch.zeros(*products.shape[:2], count, dtype=products.dtype, device=products.device)
    held = torch.zeros_like(sums).scatter_add_(-1, at, real)
    return sums.scatter_add_(-1, at, products.masked_fill(real == 0, 0.0)) / held.clamp(min=1)
