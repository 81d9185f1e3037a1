"""Scores tokens by the leverage of their keys: how far each lies outside the others' span."""

import math

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import standardized
from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer

# Added to the diagonal of the matrix of products, to make it invertible.
RIDGE = 1e-2


@attrs.frozen
class LeverageScorer(Scorer):
    """Scores tokens by the statistical leverage of their keys before rotary embedding.

    ``X`` are the keys of a row and KV head minus their mean, and ``Y = X Phi`` with a Gaussian
    ``Phi`` of ``sketch_size`` columns and variance ``1 / sketch_size``. The leverage of key ``j``
    is ``y_j (Y^T Y + 0.01 I)^-1 y_j^T``. ``saliency[g, j]`` is the leverage, standardized to mean 0
    and deviation 1 over the tokens of the row and head. All rows and heads of a layer share
    ``Phi``, so that a row gets the same saliency in every batch and every run.

    The first and the last tokens take no part in this and get 0: protect them.

    Args:
        num_sinks: First tokens of the row that are left out, at least 0.
        window_size: Last tokens that are left out, at least 0.
        sketch_size: Columns of ``Phi``, at least 1.
        seed: Seed of ``Phi``, at least 0.

    Raises:
        TypeError: An argument is not an int.
        ValueError: An argument is out of its range.

    Example:
        >>> LeverageScorer(seed=3).unscored_tail
        4

    Source: Compactor (arXiv 2507.08143), as kvpress implements it. In kvpress scores are
    standardized over all rows and heads together, and every row and head has a ``Phi`` of its own.
    """

    paper = "arXiv 2507.08143"
    needs_rotary = True  # it undoes the rotary embedding of keys

    num_sinks: int = attrs.field(default=8, kw_only=True)
    window_size: int = attrs.field(default=4, kw_only=True)
    sketch_size: int = attrs.field(default=48, kw_only=True)
    seed: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("num_sinks", self.num_sinks)
        check_count("window_size", self.window_size)
        check_count("sketch_size", self.sketch_size, minimum=1)
        check_count("seed", self.seed, maximum=None)

    @property
    def unscored_tail(self) -> int:
        """The number of last tokens that get no saliency and are always kept."""
        return self.window_size

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        assert context.layer.rotary is not None
        tail, first = context.is_tail(self.window_size), context.is_first(self.num_sinks)
        scored = context.valid & ~tail & ~first
        keys = context.layer.rotary.turned_back(context.keys.float(), context.positions)
        sketch = self._sketch(context).double()
        of_heads = [
            _leverage(keys[:, head], scored[:, head, :, None], sketch)
            for head in range(context.kv_heads)  # one at a time: keys are held in float64
        ]
        leverage = torch.stack(of_heads, dim=1)
        return standardized(leverage, scored).masked_fill_(~scored, 0.0)

    def _sketch(self, context: LayerContext) -> Tensor:
        """Draw a random projection ``[head_dim, sketch_size]``, equal on every device."""
        seed = (self.seed * 1_000_003 + context.layer_idx) % (1 << 63)
        drawn = torch.randn(
            context.keys.shape[3], self.sketch_size, generator=torch.Generator().manual_seed(seed)
        )
        return (drawn / math.sqrt(self.sketch_size)).to(context.keys.device)


def _leverage(keys: Tensor, scored: Tensor, sketch: Tensor) -> Tensor:
    """Return statistical leverage scores ``[batch, key_len]`` of keys, computed in float64.

    If there are fewer keys than channels, leverages differ only by small amounts that float32 would
    round away.
    """
    exact = keys.double().masked_fill(~scored, 0.0)
    mean = exact.sum(dim=1, keepdim=True) / scored.sum(dim=1, keepdim=True).clamp(min=1)
    sketched = ((exact - mean) * scored) @ sketch
    products = sketched.transpose(1, 2) @ sketched
    products.diagonal(dim1=1, dim2=2).add_(RIDGE)
    factor = torch.linalg.cholesky_ex(products).L
    halves: Tensor = torch.linalg.solve_triangular(factor, sketched.transpose(1, 2), upper=False)
    return halves.square().sum(dim=1)
