"""Scores tokens by the largest attention that any query gives them."""

import attrs
from torch import Tensor

from kvpolicy.attention import causal_attention_peaks
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


@attrs.frozen
class PeakAttentionScorer(Scorer):
    """Scores tokens by the largest attention that any token of the prompt gives them.

    ``saliency[g, j] = max over queries i >= j and the query heads h of KV head g of
    softmax(q_i . k_j * scaling)``, in float32, every query attending causally. Computed in blocks,
    as by `AccumulatedAttentionScorer`. A sum over queries favours early tokens, which more queries
    see; the maximum does not, and a single query is enough to keep a token.

    Without a second reading the queries are the prompt's own. With one (`Repetition`) they are
    those of the model repeating the prompt.

    Example:
        >>> PeakAttentionScorer().num_queries is None
        True

    Source: KVzip (arXiv 2505.23416), section 3.
    """

    paper = "arXiv 2505.23416"
    num_queries = None  # all

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        peaks = causal_attention_peaks(context)
        grouped = peaks.view(context.batch, context.kv_heads, -1, context.key_len)
        return grouped.amax(dim=2)
