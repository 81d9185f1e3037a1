"""Keeps half of a budget by attention, and half also by each value's effect on the output."""

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import block_bytes, group_mean
from kvpolicy.checks import check_amount, check_rate
from kvpolicy.context import LayerContext
from kvpolicy.host_counts import known_counts
from kvpolicy.interfaces import KVSelector
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
from kvpolicy.policies.selectors.wrapping import WrappingSelector
from kvpolicy.selection import ranks, select_top


@attrs.frozen
class CriticalSelector(WrappingSelector):
    """Keeps as many tokens as another selector, half of them also by their effect on the output.

    If the wrapped selector keeps ``b`` tokens of a KV head, the first ``int(b * first_share)`` are
    the protected tokens and the most salient others. The rest are the tokens of highest
    ``(saliency[g, j] + epsilon) * n[g, j]``. ``saliency[g]`` is the mean over the query heads of
    the group, and ``n[g, j]`` the mean over them of ``||v_j W_h||_1``, with ``W_h`` the layer's
    output weights of head ``h``. Use a saliency that does not depend on values already.

    Args:
        selector: Decides how many tokens each head keeps, and which are protected.
        first_share: Share of the tokens that is chosen by the saliency alone, in [0, 1].
        epsilon: Added to the saliency in the second stage, at least 0.

    Raises:
        TypeError: ``selector`` is not a `KVSelector`, or a number not one.
        ValueError: A number is out of its range; later, at a layer that shows no output weights.

    Example:
        >>> from kvpolicy.policies import AdaptiveHeadSelector
        >>> CriticalSelector(AdaptiveHeadSelector(0.1)).kept_rates(2)
        [0.1, 0.1]

    Source: CriticalKV (arXiv 2502.03805), as kvpress has it, alone and around Ada-KV.
    """

    paper = "arXiv 2502.03805"
    needs_saliency = True  # the first half of the tokens is chosen by saliency
    needs_output_weight = True  # the second half of the tokens is chosen by output weights

    selector: KVSelector = attrs.field(default=GQAGroupSelector())
    first_share: float = attrs.field(default=0.5, kw_only=True)
    epsilon: float = attrs.field(default=1e-4, kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_rate("first_share", self.first_share, zero=True)
        check_amount("epsilon", self.epsilon)

    @property
    def equal_counts(self) -> bool:
        """True if the wrapped selector keeps equally many tokens in all heads and layers."""
        return self.selector.equal_counts

    def kept_counts(self, context: LayerContext) -> tuple[int, ...] | None:
        """Return how many tokens are kept of each row: as many as the wrapped selector keeps."""
        return known_counts(self.selector, context)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the kept indices ``[batch, kv_heads, kept_len]``; see `KVSelector.select`."""
        assert saliency is not None
        scores = group_mean(saliency, context.kv_heads)
        known = known_counts(self, context)
        counts = (self.selector.select(saliency, context) >= 0).sum(dim=-1)
        valid, protected = context.valid, self.protected(context)
        candidates = valid & ~protected
        first = (counts.double() * self.first_share).long() - protected.sum(dim=-1)
        taken = candidates & (ranks(scores, candidates) < first[..., None])
        second = (scores + self.epsilon) * output_norms(context)
        budgets = known or counts.tolist()
        return select_top(second, budgets, valid=valid, protected=protected | taken)


def output_norms(context: LayerContext) -> Tensor:
    """Return the L1 norm of each value times the output weights, averaged over the KV group."""
    weight = context.layer.output_weight
    if weight is None:
        raise ValueError(
            "output_weight must be known to weigh values by it, got None at layer "
            f"{context.layer_idx}, whose heads share the stored values, or whose output weights "
            "cannot be read; use a selector that does not need them, or CAOTEScorer, which needs "
            "only values"
        )
    group = context.query_heads // context.kv_heads
    limit = block_bytes(weight.device)
    step = max(limit // (4 * context.batch * weight.shape[2]), 1)  # in pieces, to limit memory
    norms = torch.zeros(context.positions.shape, device=context.keys.device)
    for head in range(context.query_heads):
        values, of_head = context.values[:, head // group], weight[head].float()
        for start in range(0, context.key_len, step):
            block = slice(start, start + step)
            norms[:, head // group, block] += (values[:, block].float() @ of_head).abs().sum(dim=-1)
    return norms / group
