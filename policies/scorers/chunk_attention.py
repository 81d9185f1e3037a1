"""Scores tokens by the attention of nearby tokens, both earlier and later ones."""

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import group_mean, neighbour_mean, query_key_products, standardized
from kvpolicy.checks import check_count, check_kernel_size
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


@attrs.frozen
class ChunkAttentionScorer(Scorer):
    """Scores tokens by other tokens' attention in their chunk, times the norm of their values.

    After the sinks, positions are divided into chunks of ``chunk_size``. ``a[h, j] = sum over the
    new queries i of j's chunk of softmax(q_i . k_j)``, with the softmax over the keys of the chunk,
    unscaled and not causal. Its mean over a KV group is multiplied by ``||v_j||_2`` and
    average-pooled over ``kernel_size`` neighbours. ``saliency[g, j]`` is the result, standardized
    to mean 0 and deviation 1 over the row and head, in float32. The first and the last tokens take
    no part in this and get 0: protect them. In a later turn tokens in chunks without a new query
    get 0 as well, which is the mean of the others.

    Args:
        num_sinks: First tokens of the row that are left out, at least 0.
        window_size: Last tokens that are left out, at least 0.
        chunk_size: Tokens of a chunk, at least 1.
        kernel_size: Width of the pooling, odd, at least 1 (1 does not pool).

    Raises:
        TypeError: An argument is not an int.
        ValueError: An argument is out of its range.

    Example:
        >>> ChunkAttentionScorer().num_queries is None
        True

    Source: Compactor (arXiv 2507.08143), as kvpress has it; there means and deviations are taken
    over all rows and heads together, and padding counts as tokens.
    """

    paper = "arXiv 2507.08143"
    num_queries = None  # all

    num_sinks: int = attrs.field(default=8, kw_only=True)
    window_size: int = attrs.field(default=4, kw_only=True)
    chunk_size: int = attrs.field(default=256, kw_only=True)
    kernel_size: int = attrs.field(default=3, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("num_sinks", self.num_sinks)
        check_count("window_size", self.window_size)
        check_count("chunk_size", self.chunk_size, minimum=1)
        check_kernel_size(self.kernel_size)

    @property
    def unscored_tail(self) -> int:
        """The number of last tokens that get no saliency and are always kept."""
        return self.window_size

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        tail, first = context.is_tail(self.window_size), context.is_first(self.num_sinks)
        scored = context.valid & ~tail & ~first
        attention, asked = self._attention(context, scored)
        norms: Tensor = torch.linalg.vector_norm(context.values.float(), dim=-1)
        weighed = group_mean(attention, context.kv_heads) * norms.masked_fill(~asked, 0.0)
        pooled = neighbour_mean(weighed, self.kernel_size)
        return standardized(pooled, asked).masked_fill_(~asked, 0.0)

    def _attention(self, context: LayerContext, scored: Tensor) -> tuple[Tensor, Tensor]:
        """Return each key's summed attention in its chunk, and a mask of keys that got any."""
        group = context.query_heads // context.kv_heads
        sums = torch.zeros(
            context.batch, context.query_heads, context.key_len, device=context.keys.device
        )
        asked = torch.zeros_like(scored)
        for row in range(context.batch):
            for of_queries, of_keys, chunk in self._chunks(context, row):
                positions = context.positions[row, :, of_keys]
                inside = (positions - self.num_sinks) // self.chunk_size == chunk
                inside = inside & scored[row, :, of_keys]
                products = query_key_products(
                    context.queries[row : row + 1, :, of_queries],
                    context.keys[row : row + 1, :, of_keys],
                )[0]
                shown = inside.repeat_interleave(group, dim=0)[:, None]
                weights = products.masked_fill_(~shown, torch.finfo(products.dtype).min)
                weights = weights.softmax(dim=-1).masked_fill_(~shown, 0.0)
                sums[row, :, of_keys] += weights.sum(dim=1)
                asked[row, :, of_keys] |= inside
        return sums, asked

    def _chunks(self, context: LayerContext, row: int) -> list[tuple[slice, slice, int]]:
        """Yield the slices of queries and keys that belong to each chunk."""
        places = context.query_places[row]
        places = places[: max(context.query_len - self.window_size, 0)]
        if len(places) == 0 or int(places[-1]) < self.num_sinks:
            return []
        first = max(int(places[places >= self.num_sinks][0]) - self.num_sinks, 0) // self.chunk_size
        last = (int(places[-1]) - self.num_sinks) // self.chunk_size
        chunks = torch.arange(first, last + 2, device=places.device)
        starts = self.num_sinks + chunks * self.chunk_size
        positions = context.positions[row].contiguous()
        queries = torch.searchsorted(places.contiguous(), starts).tolist()
        keys = torch.searchsorted(positions, starts.expand(len(positions), -1).contiguous())
        lowest, highest = keys.amin(dim=0).tolist(), keys.amax(dim=0).tolist()
        return [
            (slice(*queries[index : index + 2]), slice(lowest[index], highest[index + 1]), chunk)
            for index, chunk in enumerate(range(first, last + 1))
            if queries[index] < queries[index + 1]
        ]
