"""Scores tokens by the attention of the prompt's last part, later queries weighing more."""

import math

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import causal_attention_sums
from kvpolicy.checks import check_rate
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


def tail_lens(context: LayerContext, recent_rate: float) -> list[int]:
    """Return how many last tokens of each row to observe: ``1 + int(seen_len * recent_rate)``."""
    new_lens = context.new_valid.sum(dim=1).tolist()
    return [
        min(1 + int(seen * recent_rate), new)
        for seen, new in zip(context.seen_len, new_lens, strict=True)
    ]


@attrs.frozen
class WeightedTailScorer(Scorer):
    """Scores tokens by the attention of the prompt's last tokens; later queries weigh more.

    ``saliency[h, j] = mean over tail queries i of w_i * softmax(q_i . k_j * scaling)`` per query
    head ``h``, in float32, causal, with ``w = linspace(1, distance_weight)`` over the tail. The
    tail is the last ``1 + int(N * recent_rate)`` of the row's ``N`` tokens.

    Args:
        recent_rate: Fraction of the row's context that makes the tail, in (0, 1].
        distance_weight: Weight of the last query against the first of the tail, above 0.

    Raises:
        TypeError: An argument is not a number.
        ValueError: An argument is out of its range.

    Example:
        >>> WeightedTailScorer().num_queries is None
        True

    Source: PyramidInfer (arXiv 2405.12532).
    """

    paper = "arXiv 2405.12532"
    num_queries = None  # all

    recent_rate: float = attrs.field(default=0.2, kw_only=True)
    distance_weight: float = attrs.field(default=1.2, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_rate("recent_rate", self.recent_rate)
        if isinstance(self.distance_weight, bool) or not isinstance(
            self.distance_weight, (int, float)
        ):
            raise TypeError(f"distance_weight must be a number, got {self.distance_weight!r}")
        if not 0 < self.distance_weight < math.inf:
            raise ValueError(
                f"distance_weight must be above 0 and finite, got {self.distance_weight}"
            )

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, query_heads, key_len]``; see `Scorer.score`."""
        lens = tail_lens(context, self.recent_rate)
        longest = min(max(lens), context.query_len)
        tail = context._showing(longest)
        weights = torch.zeros(context.batch, longest, device=context.keys.device)
        for row, length in enumerate(lens):
            shown = min(length, longest)
            steps = torch.linspace(1.0, self.distance_weight, length, device=weights.device)
            weights[row, longest - shown :] = steps[length - shown :] / length
        return causal_attention_sums(tail, weights)
