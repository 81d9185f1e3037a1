"""Scores tokens by the attention of the observation window, the last tokens of the prompt."""

import abc

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import causal_attention_sums, group_mean, neighbour_mean
from kvpolicy.checks import check_count, check_kernel_size, check_kind
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer

# The part of a salient token's saliency by which one neighbour ranks below the next: small, so that
# it orders neighbours and hardly anything else.
_RANK_STEP = 1 / 2048


@attrs.frozen
class _PooledWindowScorer(Scorer):
    """Base of scorers that pool the last tokens' attention over neighbouring tokens."""

    window_size: int = attrs.field(default=8)
    kernel_size: int = attrs.field(default=7, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("window_size", self.window_size, minimum=1)
        check_kernel_size(self.kernel_size)

    @property
    def num_queries(self) -> int:
        """The number of last queries whose attention the scorer reads."""
        return self.window_size

    @property
    def unscored_tail(self) -> int:
        """The number of last tokens that get no saliency and are always kept."""
        return self.window_size

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, query_heads or kv_heads, key_len]``; see `Scorer.score`."""
        before = max(context.key_len - self.window_size, 0)
        attention = self._of_heads(causal_attention_sums(context), context)
        if not before:
            return torch.zeros_like(attention)
        pooled = self._pooled(attention[..., :before])
        return torch.constant_pad_nd(pooled, (0, attention.shape[-1] - before))

    def _of_heads(self, attention: Tensor, context: LayerContext) -> Tensor:
        """Return the attention ``[batch, heads, key_len]`` of the heads that are pooled."""
        return attention

    @abc.abstractmethod
    def _pooled(self, attention: Tensor) -> Tensor:
        """Pool attention ``[batch, heads, before]`` over neighbouring tokens; padding is 0."""


@attrs.frozen
class WindowMaxPoolScorer(_PooledWindowScorer):
    """Scores tokens by the last tokens' attention, max-pooled over neighbouring tokens.

    ``saliency[h, j] = max over |j' - j| <= kernel_size // 2 of sum over window queries i of
    softmax(q_i . k_j' * scaling)``, per query head ``h``, in float32, causal inside the window;
    ``j`` and ``j'`` run over the tokens before the window. Pooling keeps a salient token's
    neighbours with it.

    With ``group_first`` the sums are averaged over the query heads of each KV group, then pooled:
    one saliency per KV head. The maximum of a mean is not the mean of the maxima, so the two orders
    rank tokens differently. Heads that share storage, as under latent attention, are one group.

    Pooling gives ``kernel_size`` neighbours the same saliency, and of equal tokens selectors take
    the earliest: a layer with room for three of seven keeps the three before the salient token.
    With ``peak_first`` it keeps the salient token and those that follow it: of ``r`` neighbours on
    each side, the one ``d`` after the salient token has the share ``1 - d / 2048`` of its saliency,
    and the one ``d`` before it has ``1 - (r + d) / 2048``.

    Args:
        window_size: Tokens of the observation window, at least 1. In a later turn with fewer new
            tokens only their queries are used; the unscored window stays this long.
        kernel_size: Width of the pooling, odd, at least 1 (1 does not pool).
        group_first: Whether attention is averaged over each KV group before it is pooled.
        peak_first: Whether a salient token ranks above the neighbours that share its saliency,
            and those after it above those before it.

    Raises:
        TypeError: A number is not an int, or ``group_first`` or ``peak_first`` not a bool.
        ValueError: ``window_size`` is below 1 or ``kernel_size`` even or below 1.

    Example:
        >>> WindowMaxPoolScorer(window_size=16).num_queries
        16

    Source: SnapKV (arXiv 2404.14469), section 4; FastKV (arXiv 2502.01068), section 3, whose code
    pools first; that of Ada-KV and KVCache-Factory averages over the group first. Tokens in the
    window get saliency 0 here: selectors protect them as a set.
    """

    paper = "arXiv 2404.14469"

    group_first: bool = attrs.field(default=False, kw_only=True)
    peak_first: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_kind("group_first", self.group_first, bool)
        check_kind("peak_first", self.peak_first, bool)

    def _of_heads(self, attention: Tensor, context: LayerContext) -> Tensor:
        if not self.group_first:
            return attention
        if context._stored is None:
            return group_mean(attention, context.kv_heads)
        # All heads read the same stored keys, so they are one group, in whatever process they are.
        return context.layer.heads.mean(attention)[:, None].expand(-1, context.kv_heads, -1)

    def _pooled(self, attention: Tensor) -> Tensor:
        # Padding on the left has attention 0, which never wins the maximum of a token's
        # neighbourhood: a padded row pools as without padding.
        reach = self.kernel_size // 2
        if not self.peak_first:
            return torch.max_pool1d(attention, self.kernel_size, stride=1, padding=reach)
        count, padded = attention.shape[-1], torch.constant_pad_nd(attention, (reach, reach))
        pooled = attention
        for rank in range(1, 2 * reach + 1):
            offset = rank if rank <= reach else reach - rank  # from the salient token
            shares = padded.narrow(-1, reach - offset, count) * (1 - rank * _RANK_STEP)
            pooled = torch.maximum(pooled, shares)
        return pooled


@attrs.frozen
class WindowMeanPoolScorer(_PooledWindowScorer):
    """Scores tokens by the last tokens' attention, average-pooled over neighbouring tokens.

    ``saliency[h, j] = sum over |j' - j| <= kernel_size // 2 of a_j' / kernel_size`` with
    ``a_j' = sum over window queries i of softmax(q_i . k_j' * scaling)``, per query head ``h``, in
    float32, causal inside the window; ``j`` and ``j'`` run over the tokens before the window, and
    what lies beyond them counts as 0.

    Args:
        window_size: Tokens of the observation window, at least 1; see `WindowMaxPoolScorer`.
        kernel_size: Width of the pooling, odd, at least 1 (1 does not pool).

    Raises:
        TypeError: An argument is not an int.
        ValueError: ``window_size`` is below 1 or ``kernel_size`` even or below 1.

    Example:
        >>> WindowMeanPoolScorer(kernel_size=5).unscored_tail
        8

    Source: the published code of SnapKV (arXiv 2404.14469), and CLAA (arXiv 2602.16054).
    """

    paper = "arXiv 2602.16054"

    def _pooled(self, attention: Tensor) -> Tensor:
        # Padding on the left has attention 0, like the zeros before a row without padding.
        return neighbour_mean(attention, self.kernel_size)


@attrs.frozen
class WindowAttentionScorer(Scorer):
    """Scores all tokens, the last ones included, by the last tokens' attention.

    ``saliency[h, j] = mean over window queries i of softmax(q_i . k_j * scaling)`` per query head
    ``h``, in float32, causal inside the window, max-pooled over ``kernel_size`` neighbours. The
    window's own tokens are scored too, so that they need not be kept. Without pooling the saliency
    of a head sums to 1 over all tokens, unless its softmax has a sink.

    Args:
        window_size: Tokens of the observation window, at least 1.
        kernel_size: Width of the max-pooling, odd, at least 1 (1 does not pool).

    Raises:
        TypeError: An argument is not an int.
        ValueError: ``window_size`` is below 1 or ``kernel_size`` even or below 1.

    Example:
        >>> WindowAttentionScorer(window_size=64).unscored_tail
        0

    Source: UniPrefill (arXiv 2605.06221).
    """

    paper = "arXiv 2605.06221"

    window_size: int = 128
    kernel_size: int = attrs.field(default=1, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("window_size", self.window_size, minimum=1)
        check_kernel_size(self.kernel_size)

    @property
    def num_queries(self) -> int:
        """The number of last queries whose attention the scorer reads."""
        return self.window_size

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, query_heads, key_len]``; see `Scorer.score`."""
        observing = context.query_valid.sum(dim=1)[:, None, None].clamp(min=1)
        attention = causal_attention_sums(context) / observing
        if self.kernel_size == 1:
            return attention
        # Padding on the left has attention 0; see `WindowMaxPoolScorer`.
        return torch.max_pool1d(
            attention, self.kernel_size, stride=1, padding=self.kernel_size // 2
        )
