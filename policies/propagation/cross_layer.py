"""Drops tokens after one layer, by the saliency of several layers."""

from typing import Literal

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import group_mean, neighbour_mean, standardized
from kvpolicy.checks import check_count, check_kernel_size, check_kind
from kvpolicy.context import LayerContext
from kvpolicy.policies.propagation.token_selective import TokenSelectivePropagation

REDUCTIONS = ("max", "mean")
# More than any model has.
ALL_LAYERS = 1 << 16


@attrs.frozen
class CrossLayerPropagation(TokenSelectivePropagation):
    """Drops tokens after one layer, except the most salient in any of the last few layers.

    ``ranking[j] = max over layers l and KV heads g of a[l, g, j]``, where ``a[l, g]`` is the mean
    of the saliency over the query heads of ``g``. The layers ``l`` are the acting layer and the
    ones before it, ``voting_layers`` in all or as many as there are; layers at which nothing is
    chosen, such as recurrent ones and sliding windows, do not count. Under latent attention every
    query head counts as a KV head. With ``standardize``, ``a[l, g]`` is first standardized to mean
    0 and deviation 1 over the row's new tokens before the window, so that no layer or head wins by
    its scale alone.

    Args:
        tsp_rate: Fraction of the row's context that goes on, in (0, 1]. 0.2 by default.
        tsp_layer: Index of the layer after which tokens are dropped, from 0; None for
            ``num_layers // 2 - 1``, or the layer nearest to it that sees the whole context.
        window_size: Trailing tokens that always go on, at least 1.
        tsp_tokens: Number of tokens that go on, in place of the rate.
        protect: First tokens of the row's context that always go on, at least 0.
        tsp_depth: The layer as a fraction of the model, in place of ``tsp_layer``; see
            `TokenSelectivePropagation`.
        voting_layers: Number of layers whose saliency counts, the acting one included; at least 1.
            None for all up to the acting one.
        standardize: Whether the saliency of each layer and head is standardized first.
        reduction: ``"max"``, or ``"mean"`` for the mean over layers and KV heads.
        kernel_size: Width, odd, of a mean over neighbouring tokens' rankings; 1 for none. What
            lies outside, and the window, counts as 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, both budgets are given, or both ``tsp_layer``
            and ``tsp_depth``.

    Example:
        >>> CrossLayerPropagation(tsp_layer=15, voting_layers=4).history_layers
        3

    Source: CLAA (arXiv 2602.16054). The newest version of its code standardizes, an earlier one
    does not; which of the two the paper used is uncertain.
    """

    paper = "arXiv 2602.16054"

    voting_layers: int | None = attrs.field(default=4, kw_only=True)
    standardize: bool = attrs.field(default=True, kw_only=True)
    reduction: Literal["max", "mean"] = attrs.field(default="max", kw_only=True)
    kernel_size: int = attrs.field(default=1, kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.voting_layers is not None:
            check_count("voting_layers", self.voting_layers, minimum=1)
        check_kind("standardize", self.standardize, bool)
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {self.reduction!r}")
        check_kernel_size(self.kernel_size)

    @property
    def history_layers(self) -> int:
        """The number of earlier layers whose saliency this policy reads."""
        return ALL_LAYERS if self.voting_layers is None else self.voting_layers - 1

    def ranking(self, saliency: Tensor, context: LayerContext) -> Tensor:
        """Return each new token's score: its largest saliency in any of the layers."""
        own = saliency[..., context.key_len - context.new_len :]
        before = context.layer.history[max(len(context.layer.history) - self.history_layers, 0) :]
        per_head = [group_mean(each, context.kv_heads) for each in (*before, own)]
        scored = context.new_valid & ~context.is_new_tail(self.window_size)
        if self.standardize:
            per_head = [standardized(each, scored[:, None]) for each in per_head]
        if self.reduction == "mean":
            found = torch.stack([context.layer.heads.mean(each) for each in per_head]).mean(dim=0)
        else:
            largest = torch.stack(per_head).amax(dim=0)  # of layers, [batch, kv_heads, new_len]
            found = context.layer.heads.gather(largest).amax(dim=1)
        if self.kernel_size == 1:
            return found
        return neighbour_mean(found.masked_fill(~scored, 0.0), self.kernel_size)
