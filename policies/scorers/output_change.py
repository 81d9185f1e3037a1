"""Scores tokens by how much the attention output changes if one is evicted."""

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_kind
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer
from kvpolicy.policies.scorers.window import WindowMaxPoolScorer
from kvpolicy.policies.scorers.wrapping import WrappingScorer


@attrs.frozen
class CAOTEScorer(WrappingScorer):
    """Scores tokens by how much a head's attention output would change without them.

    ``saliency'[h, j] = a_j / (1 - a_j) * ||o - v_j||_2`` with ``a = saliency[h] / sum saliency[h]``
    over the tokens that are scored, and ``o = sum over i of a_i v_i``, in float32: exactly the
    change of ``o`` when the other weights are made to sum to 1 again. Computed for each head of the
    scorer, with the values of its KV head. Meant for saliencies that are not negative, such as
    attention; negative ones count as 0.

    Args:
        scorer: Gives the saliency.
        fast: Whether the mean of the values replaces ``o``, one for all heads of a group.

    Raises:
        TypeError: ``scorer`` is not a `Scorer`, or ``fast`` not a bool.

    Example:
        >>> from kvpolicy.policies import LastQueryScorer
        >>> CAOTEScorer(LastQueryScorer()).num_queries
        1

    Source: CAOTE (arXiv 2504.14051) and its FastCAOTE, as described by others. No code was
    published, and its handling of query head groups is not known; here every query head has its own
    scores, which selectors average. The paper evicts few tokens at a time and scores again; here
    tokens are scored once. For a token with all of the weight ``a / (1 - a)`` is undefined: its
    change is set to ``||v_j||_2``, and with ``fast`` ``1 - a`` is at least 1e-6.
    """

    paper = "arXiv 2504.14051"

    scorer: Scorer = attrs.field(default=WindowMaxPoolScorer())
    fast: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_kind("fast", self.fast, bool)

    def _changed(self, saliency: Tensor, context: LayerContext) -> Tensor:
        weights = saliency.clamp(min=0)
        weights = weights.reshape(context.batch, context.kv_heads, -1, context.key_len)
        weights = weights.masked_fill(~context.valid[:, :, None], 0.0)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=_TINY)
        changes = self._mean_changes if self.fast else self._exact_changes
        return changes(weights, context).flatten(1, 2)

    @staticmethod
    def _exact_changes(weights: Tensor, context: LayerContext) -> Tensor:
        """Return how much each query head's output changes without each token.

        For the heaviest token the formula divides a small difference by another. Its change is
        computed as ``a_j ||m - v_j||`` instead, with ``m`` the weighted mean of the others.
        """
        values = context.values.float()
        heaviest, most, others = _heaviest(weights)
        at_heaviest = values.gather(2, heaviest.expand(*heaviest.shape[:3], values.shape[3]))
        of_others = others @ values
        distances = _distances(of_others + most * at_heaviest, values)
        mean = of_others / others.sum(dim=-1, keepdim=True).clamp(min=_TINY)
        apart: Tensor = torch.linalg.vector_norm(mean - at_heaviest, dim=-1, keepdim=True)
        changes = others / (1 - others) * distances
        return changes.scatter(-1, heaviest, most * apart)

    @staticmethod
    def _mean_changes(weights: Tensor, context: LayerContext) -> Tensor:
        """Return how much a KV group's mean output changes without each token."""
        values, real = context.values.float(), context.valid[..., None]
        count = real.sum(dim=2, keepdim=True).clamp(min=1)
        mean = values.masked_fill(~real, 0.0).sum(dim=2, keepdim=True) / count
        heaviest, _, others = _heaviest(weights)
        left = (1 - weights).scatter(-1, heaviest, others.sum(dim=-1, keepdim=True))
        return weights / left.clamp(min=1e-6) * _distances(mean, values)


_TINY = torch.finfo(torch.float32).tiny


def _heaviest(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split attention weights into the largest one (index and value) and the others, where it is 0.

    One minus the largest weight is the sum of the others, which subtraction would round away.
    """
    most, heaviest = weights.max(dim=-1, keepdim=True)
    return heaviest, most, weights.scatter(-1, heaviest, 0.0)


def _distances(outputs: Tensor, values: Tensor) -> Tensor:
    """Return the distance of each value vector to each attention output of its KV head."""
    return torch.cdist(outputs, values, compute_mode="donot_use_mm_for_euclid_dist")
