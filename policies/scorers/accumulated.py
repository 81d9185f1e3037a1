"""What all queries together attend to."""

from __future__ import annotations

from typing import ClassVar

import attrs
from torch import Tensor

from kvpolicy.attention import causal_attention_sums
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


@attrs.frozen
class AccumulatedAttentionScorer(Scorer):
    """Attention that all tokens of the prompt give each token, summed over them.

    ``saliency[h, j] = sum over queries i >= j of softmax(q_i . k_j * scaling)`` per query head
    ``h``, in float32, every query attending causally. Computed in blocks: the memory is that of few
    queries, not of a matrix of all queries and keys. In a later turn the new tokens observe.

    Example:
        >>> AccumulatedAttentionScorer().num_queries is None
        True

    Source: H2O (arXiv 2306.14048). The code that FastKV compares with masks only the last window
    causally, so that earlier queries see the future; ours is causal throughout.
    """

    paper: ClassVar[str] = "arXiv 2306.14048"

    @property
    def num_queries(self) -> None:
        """All of them."""
        return

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, query_heads, key_len]``; see `Scorer.score`."""
        return causal_attention_sums(context)
