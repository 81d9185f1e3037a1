"""Scores tokens by the attention that future queries are expected to give them."""

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_amount, check_count, check_kind
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer
from kvpolicy.rotary import RotaryEmbedding

# Positions whose rotations are held at a time.
BLOCK = 64


@attrs.frozen
class ExpectedAttentionScorer(Scorer):
    """Scores tokens by the attention expected from future queries, times their values' norms.

    ``m`` and ``C`` are mean and covariance of a query head's new queries behind the sinks, before
    rotary embedding, ``R`` the mean rotation over the ``future_len`` positions behind the row's
    last token, and ``m' = R m``, ``C' = R C R^T``. If future queries were normally distributed, the
    exponential of key ``j``'s logit would be ``exp(k_j . m' * scaling + k_j^T C' k_j * scaling^2 /
    2)`` on average. ``a`` is this value as a share of the sum over the tokens after the sinks,
    averaged over a KV group; ``saliency[g, j] = (a[g, j] + epsilon) * ||v_j||_2``, in float32.

    Sinks take no part in this and get 0: protect them, as by ``protect=4``.

    Args:
        num_sinks: First tokens of the row that are left out, at least 0.
        future_len: Number of future positions that the rotation is averaged over, at least 1.
        epsilon: Added to the shares, at least 0: how much the value alone counts.
        by_value: Whether shares are multiplied by the norm of the value.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range.

    Example:
        >>> ExpectedAttentionScorer(future_len=128).needs_rotary
        True

    Source: Expected Attention (arXiv 2510.00636), as kvpress implements it. The paper multiplies by
    the norm of the projected value (from memory); kvpress and this class by the value's norm. In
    kvpress future positions are counted from the number of tokens read at once, padding included;
    here they follow each row's own last token, in every turn. Logit caps and attention sinks of a
    model are ignored.
    """

    paper = "arXiv 2510.00636"
    num_queries = None  # all
    needs_rotary = True  # it undoes the rotary embedding of queries

    num_sinks: int = attrs.field(default=4, kw_only=True)
    future_len: int = attrs.field(default=512, kw_only=True)
    epsilon: float = attrs.field(default=0.0, kw_only=True)
    by_value: bool = attrs.field(default=True, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("num_sinks", self.num_sinks)
        check_count("future_len", self.future_len, minimum=1)
        check_amount("epsilon", self.epsilon)
        check_kind("by_value", self.by_value, bool)

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        assert context.layer.rotary is not None
        positions = context.query_places
        start = context.positions[:, 0, -1] + 1  # the last slot is every row's last token
        turn = mean_rotation(context.layer.rotary, start, self.future_len, context.keys.shape[3])
        scored = context.valid & (context.positions >= self.num_sinks)
        group = context.query_heads // context.kv_heads
        shares = torch.zeros(context.positions.shape, device=context.keys.device)
        for head in range(context.kv_heads):  # one at a time: queries are held in float32
            queries = context.queries[:, head * group : (head + 1) * group].float()
            queries = context.layer.rotary.turned_back(queries, positions[:, None])
            mean, covariance = _statistics(queries, positions >= self.num_sinks)
            mean, covariance = (
                mean @ turn,
                turn.transpose(1, 2)[:, None] @ covariance @ turn[:, None],
            )
            keys = context.keys[:, head].float() * context.attention.scaling
            logits = mean @ keys.transpose(1, 2)  # [batch, group, key_len]
            for index in range(group):
                logits[:, index] += ((keys @ covariance[:, index]) * keys).sum(dim=-1) / 2
            logits.masked_fill_(~scored[:, head, None], torch.finfo(logits.dtype).min)
            shares[:, head] = logits.softmax(dim=-1).mean(dim=1)
        if self.by_value:
            norms: Tensor = torch.linalg.vector_norm(context.values.float(), dim=-1)
            shares = (shares + self.epsilon) * norms
        return shares.masked_fill_(~scored, 0.0)


def mean_rotation(rotary: RotaryEmbedding, start: Tensor, count: int, head_dim: int) -> Tensor:
    """Return the mean rotation matrix over ``count`` positions from each row's ``start`` on.

    It is float32 ``[batch, head_dim, head_dim]``, to be multiplied from the right.
    """
    basis = torch.eye(head_dim, device=start.device)[None, :, None]
    total = torch.zeros(len(start), head_dim, head_dim, device=start.device)
    for first in range(0, count, BLOCK):
        ahead = torch.arange(first, min(first + BLOCK, count), device=start.device)
        states = basis.expand(len(start), -1, len(ahead), -1)
        total += rotary.turned(states, (start[:, None] + ahead)[:, None]).sum(dim=2)
    return total / count


def _statistics(queries: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries' mean ``[batch, heads, head_dim]`` and covariance over tokens.

    The queries are ``[batch, heads, query_len, head_dim]``; 0 if no query counts.
    """
    left_out = ~counted[:, None, :, None]
    count = counted.sum(dim=1).clamp(min=1)[:, None, None]
    mean = queries.masked_fill(left_out, 0.0).sum(dim=2) / count
    centered = (queries - mean[:, :, None]).masked_fill_(left_out, 0.0)
    return mean, centered.transpose(2, 3) @ centered / count[..., None]
