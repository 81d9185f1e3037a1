"""Scores tokens by the attention they receive from all queries together."""

import attrs
from torch import Tensor

from kvpolicy.attention import causal_attention_sums, group_mean
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


@attrs.frozen
class AccumulatedAttentionScorer(Scorer):
    """Scores tokens by the sum of the attention that all tokens of the prompt give them.

    ``saliency[h, j] = sum over queries i >= j of softmax(q_i . k_j * scaling)`` per query head
    ``h``, in float32, every query attending causally. Computed in blocks: the memory is that of few
    queries, not of a matrix of all queries and keys. In a later turn the sum is over the new
    tokens' queries. If a policy evicts while it decodes, the sum is over all queries since the
    prompt's first; the scorer's state holds it, averaged over each KV group.

    Example:
        >>> AccumulatedAttentionScorer().num_queries is None
        True

    Source: H2O (arXiv 2306.14048). The code that FastKV compares with masks only the last window
    causally, so that earlier queries see the future; ours is causal throughout.
    """

    paper = "arXiv 2306.14048"
    num_queries = None  # all
    state_size = 1  # each key's attention sum, kept between evictions
    accumulates = True  # the saliency is a sum over queries, computed block by block

    def update(self, context: LayerContext) -> tuple[Tensor, Tensor]:
        """Add new queries' attention to each key's sum; return the sums as saliency and state."""
        sums = group_mean(causal_attention_sums(context), context.kv_heads)
        if context.decoding.state is not None:
            sums = sums + context.decoding.state[..., 0]
        return sums, sums[..., None]

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, query_heads, key_len]``; see `Scorer.score`."""
        return causal_attention_sums(context)
