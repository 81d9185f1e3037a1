"""Scores tokens by the last query's attention."""

import attrs
from torch import Tensor

from kvpolicy.attention import causal_attention_sums, neighbour_mean, query_key_products
from kvpolicy.checks import check_kernel_size, check_kind
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


@attrs.frozen
class LastQueryScorer(Scorer):
    """Scores tokens by the attention that the last token of the prompt gives them.

    ``saliency[h, j] = softmax(q_last . k_j * scaling)`` per query head ``h``, in float32.

    Example:
        >>> LastQueryScorer().num_queries
        1

    Source: TOVA, Transformers are Multi-State RNNs (arXiv 2401.06104).
    """

    paper = "arXiv 2401.06104"
    num_queries = 1

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, query_heads, key_len]``; see `Scorer.score`."""
        return causal_attention_sums(context)


@attrs.frozen
class LastQueryProductScorer(Scorer):
    """Scores tokens by the last query's dot products with their keys, average-pooled.

    ``saliency[h, j] = sum over |j' - j| <= kernel_size // 2 of q_last . k_j' / kernel_size`` per
    query head ``h``, in float32, unscaled and without softmax; keys beyond the edges count as 0.

    Args:
        kernel_size: Width of the pooling, odd, at least 1 (1 does not pool).
        own: Whether the last token's product with its own key counts; if not, it is 0 before
            pooling.

    Raises:
        TypeError: ``kernel_size`` is not an int, or ``own`` not a bool.
        ValueError: ``kernel_size`` is even or below 1.

    Example:
        >>> LastQueryProductScorer(kernel_size=1).num_queries
        1

    Source: GemFilter (arXiv 2409.17422), algorithm 1; PromptDistill (arXiv 2503.23274), without the
    last token's own.
    """

    paper = "arXiv 2409.17422"
    num_queries = 1

    kernel_size: int = attrs.field(default=5, kw_only=True)
    own: bool = attrs.field(default=True, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_kernel_size(self.kernel_size)
        check_kind("own", self.own, bool)

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, query_heads, key_len]``; see `Scorer.score`."""
        group = context.query_heads // context.kv_heads
        products = query_key_products(context.queries, context.keys)[:, :, -1]
        # Padding on the left is 0, as is what lies before a row without padding.
        products.masked_fill_(~context.valid.repeat_interleave(group, dim=1), 0.0)
        if not self.own:
            products[..., -1] = 0.0
        return neighbour_mean(products, self.kernel_size)
