"""Scores tokens by how little their keys resemble three means: far, near and nearest keys'."""

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer

# The paper's numbers: what each mean counts before anything is known of the head (all keys, block,
# window), how much a mean that tells tokens apart gains, and where and how steeply the gate opens.
_PRIOR = (0.4, 0.4, 0.2)
_GAIN = 3.0
_GATE, _STEEPNESS = 0.6, 10.0
# Where no block size is given: one 32nd of the tokens, within these bounds.
_SHARE, _SMALLEST, _LARGEST = 32, 128, 256
# Cosines that differ by less are equal: scaled to [0, 1], their rounding would decide.
_ROUNDING = 1e-5


@attrs.frozen
class KeyAnomalyScorer(Scorer):
    """Scores tokens by how little their keys resemble all keys, their block's and the last ones.

    Per KV head, after rotary embedding, in float32, over the ``n`` tokens that the head holds. With
    ``d_i = k_i / ||k_i||`` there are three means for token ``i``: of all ``d``; of those in its
    block, counted from the first held token; and of the last ``local_size`` up to ``i``. ``a_m(i)``
    is minus the cosine of ``d_i`` with mean ``m``, scaled to [0, 1] over the head's tokens.

    - The head's mixture is ``b(i) = sum over m of w_m a_m(i)``, ``w = softmax over m of (log p_m +
      3 g_m)``. ``g_m`` is how well ``m`` tells tokens apart: the mean of the highest tenth of
      ``a_m``, less that of the lowest; and ``p = (0.4, 0.4, 0.2)``.
    - Where the three disagree, the highest counts: ``saliency = b + c (max over m of a_m - b)``
      with ``c = sigmoid(10 (s - mean of s - 0.6))`` and ``s`` the standard deviation of the three
      numbers, scaled to [0, 1] over the head's tokens.

    Args:
        local_size: Tokens of the third mean, at least 1.
        block_size: Tokens of a block, at least 1; None for a 32nd of ``n``, between 128 and 256.

    Raises:
        TypeError: An argument is not an int.
        ValueError: An argument is below 1.

    Example:
        >>> KeyAnomalyScorer(block_size=64).num_queries
        0

    Source: NestedKV (arXiv 2605.26678), sections 2.2 to 2.4 and appendix A. In the highest and the
    lowest tenth are ``max(n // 10, 1)`` tokens; the paper does not say how it rounds. Numbers of a
    head that differ by less than 1e-5 are scaled to 0.
    """

    paper = "arXiv 2605.26678"

    local_size: int = attrs.field(default=64, kw_only=True)
    block_size: int | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("local_size", self.local_size, minimum=1)
        if self.block_size is not None:
            check_count("block_size", self.block_size, minimum=1)

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        valid = context.valid
        directions = functional.normalize(context.keys.float(), dim=-1) * valid[..., None]
        anomalies = torch.stack(
            [_scaled(-_cosines(directions, each), valid) for each in self._sums(directions, valid)]
        )  # [3, batch, kv_heads, key_len]
        weights = _weights(anomalies, valid)
        mixed = (anomalies * weights[..., None]).sum(dim=0)
        disagreement = _scaled(anomalies.std(dim=0, correction=0), valid)
        mean = disagreement.sum(dim=-1, keepdim=True) / valid.sum(dim=-1, keepdim=True).clamp(min=1)
        gate = torch.sigmoid(_STEEPNESS * (disagreement - mean - _GATE))
        return mixed + gate * (anomalies.amax(dim=0) - mixed)

    def _sums(self, directions: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum all directions, those of each token's block, and the last ones up to each token.

        A sum points where the mean does. Padding on the left adds zeros.
        """
        total = directions.sum(dim=2, keepdim=True)
        key_len, held = valid.shape[2], valid.sum(dim=-1, keepdim=True)
        if self.block_size is None:
            size = (held // _SHARE).clamp(_SMALLEST, _LARGEST)
        else:
            size = torch.full_like(held, self.block_size)
        slots = torch.arange(key_len, device=valid.device)
        block = ((slots - (key_len - held)).clamp(min=0) // size)[..., None].expand_as(directions)
        blocks = torch.zeros_like(directions).scatter_add_(2, block, directions).gather(2, block)
        rows = (
            functional.pad(directions, (0, 0, self.local_size - 1, 0)).transpose(2, 3).flatten(1, 2)
        )
        local = functional.avg_pool1d(rows, self.local_size, stride=1)
        return total, blocks, local.view(*directions.transpose(2, 3).shape).transpose(2, 3)


def _cosines(directions: Tensor, sums: Tensor) -> Tensor:
    """Return the cosine of each direction with each sum, ``[batch, kv_heads, key_len]``."""
    return (directions * functional.normalize(sums, dim=-1)).sum(dim=-1)


def _scaled(scores: Tensor, valid: Tensor) -> Tensor:
    """Scale a head's scores to [0, 1] over its tokens; 0 if all are alike, and on padding."""
    low = scores.masked_fill(~valid, torch.inf).amin(dim=-1, keepdim=True)
    reach = scores.masked_fill(~valid, -torch.inf).amax(dim=-1, keepdim=True) - low
    return ((scores - low) / reach).masked_fill(~valid | (reach < _ROUNDING), 0.0)


def _weights(anomalies: Tensor, valid: Tensor) -> Tensor:
    """Return how much each of the three anomalies counts in a head, ``[3, batch, kv_heads]``."""
    held = valid.sum(dim=-1, keepdim=True)
    tenth = (held // 10).clamp(min=1)
    order = anomalies.masked_fill(~valid, -1.0).sort(dim=-1).values  # padding stays on the left
    slots = torch.arange(valid.shape[2], device=valid.device)
    first = valid.shape[2] - held
    low = (slots >= first) & (slots < first + tenth)
    high = slots >= valid.shape[2] - tenth
    gaps = (order * high).sum(dim=-1) - (order * low).sum(dim=-1)
    prior = torch.tensor(_PRIOR, device=valid.device).log()[:, None, None]
    return (prior + _GAIN * gaps / tenth[..., 0]).softmax(dim=0)
