"""Scores tokens by the size of their keys and values among their neighbours, without queries."""

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


@attrs.frozen
class CURScorer(Scorer):
    """Scores tokens by their keys' and values' shares of the squared norms of nearby tokens.

    The tokens that a KV head holds are divided into stretches of ``local_size``, counted from the
    row's first; the last may be shorter. ``saliency[h, j] = K_j * V_j / sum over i of K_i * V_i``
    per KV head ``h``, in float32, with ``K_j = ||k_j||^2 / sum over its stretch of ||k_i||^2`` and
    ``V`` is the same of values. Sinks have 1. Rotary embedding, which keeps norms, changes nothing.

    Args:
        num_sinks: First tokens of the row, which come first of all, at least 0.
        local_size: Tokens of a stretch, at least 1 (1 makes all equal).

    Raises:
        TypeError: An argument is not an int.
        ValueError: An argument is out of its range.

    Example:
        >>> CURScorer().num_queries
        0

    Source: CurDKV (arXiv 2509.15038), which chooses tokens as a CUR decomposition chooses rows, by
    leverage; as kvpress's ``CURPress`` does by default, shares of norms approximate leverage here,
    without random projections. If all norms are 0, shares are 0, in place of 0 / 0.
    """

    paper = "arXiv 2509.15038"

    num_sinks: int = attrs.field(default=4, kw_only=True)
    local_size: int = attrs.field(default=16, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("num_sinks", self.num_sinks)
        check_count("local_size", self.local_size, minimum=1)

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        slots = torch.arange(context.key_len, device=context.keys.device)
        padding = context.key_len - context.valid.sum(dim=-1, keepdim=True)
        stretches = (slots - padding).clamp(min=0) // self.local_size
        product = torch.ones(context.positions.shape, device=context.keys.device)
        for states in (context.keys, context.values):
            norms = states.float().square().sum(dim=-1).masked_fill(~context.valid, 0.0)
            sums = torch.zeros_like(norms).scatter_add_(-1, stretches, norms)
            product *= _share(norms, sums.gather(-1, stretches))
        shares = _share(product, product.sum(dim=-1, keepdim=True))
        return shares.masked_fill(context.is_first(self.num_sinks), 1.0)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return part / whole.clamp(min=torch.finfo(whole.dtype).tiny)
