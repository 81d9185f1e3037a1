"""Measure which tokens a model attends to, layer by layer.

The questions behind token-selective propagation (FastKV, arXiv 2502.01068): do layers agree on
which tokens matter (figure 1a), and how much attention do those tokens hold (figure 1b)? What it
costs to drop the others is in `kvpolicy.evaluation.analysis.distances`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from kvpolicy.evaluation.analysis.forward import WindowAttentionScorer, layer_saliencies
from kvpolicy.evaluation.analysis.inputs import (
    check_k,
    check_ks,
    check_prompt,
    check_saliency,
    check_window,
)
from kvpolicy.selection import select_top

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@attrs.frozen
class Overlap:
    """How many of their top-k tokens every two model layers have in common.

    Args:
        k: Tokens that each layer names.
        pairs: ``pairs[a][b]``, the fraction ``|A & B| / k`` of the tokens of layer ``a`` that layer
            ``b`` names too, in [0, 1].

    Example:
        >>> overlap = Overlap(k=4, pairs=((1.0, 0.5, 0.25), (0.5, 1.0, 0.75), (0.25, 0.75, 1.0)))
        >>> overlap.by_distance()
        (1.0, 0.625, 0.25)
        >>> overlap.by_distance(range(1, 3))
        (1.0, 0.75)
    """

    k: int
    pairs: tuple[tuple[float, ...], ...]

    @property
    def num_layers(self) -> int:
        """The number of model layers compared."""
        return len(self.pairs)

    def by_distance(self, layers: range | None = None) -> tuple[float, ...]:
        """Return the mean top-k overlap of layers that are 0, 1, 2, ... layers apart.

        Args:
            layers: Consecutive layers, both of a pair among them; None for all.
        """
        chosen = range(self.num_layers) if layers is None else layers
        means = []
        for distance in range(len(chosen)):
            at = [self.pairs[layer][layer + distance] for layer in chosen[: len(chosen) - distance]]
            means.append(sum(at) / len(at))
        return tuple(means)


def window_attention(
    model: PreTrainedModel, input_ids: Sequence[int] | Tensor, window_size: int = 8
) -> Tensor:
    """Return the share of the last tokens' attention that each prompt token gets, per layer.

    ``share[l, j] = mean over heads h and window queries i of softmax(q_i . k_j * scaling)``, every
    query over all keys up to its own. No matrix of all queries times keys is computed here; that
    the model computes none is up to its attention implementation (``sdpa`` does not, ``eager``
    does).

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: The prompt's tokens, ``[context_len]`` or ``[1, context_len]``.
        window_size: Tokens of the observation window, in [1, context_len].

    Returns:
        float64 ``[num_layers, context_len]`` on the CPU; each layer's shares add up to 1.

    Raises:
        TypeError: ``input_ids`` or ``window_size`` is not of ints.
        ValueError: The prompt is empty, no single row, outside the vocabulary, or shorter than the
            window; or the model is in training mode.
    """
    prompt = check_prompt(model, input_ids)
    check_window(window_size, prompt.shape[1])
    sums, _ = layer_saliencies(model, prompt, WindowAttentionScorer(window_size))
    return sums.double() / window_size


def topk_overlap(
    model: PreTrainedModel, input_ids: Sequence[int] | Tensor, k: int, *, window_size: int = 8
) -> Overlap:
    """Measure what share of their k most attended tokens every two layers have in common.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: The prompt's tokens, ``[context_len]`` or ``[1, context_len]``.
        k: Tokens that each layer names, in [1, context_len]; two layers that choose at random
            agree in ``k / context_len`` of them.
        window_size: Tokens of the observation window whose attention counts.

    Raises:
        TypeError: See `window_attention`; or ``k`` is not an int.
        ValueError: See `window_attention`; or ``k`` is out of its range.

    Source: FastKV (arXiv 2502.01068), figure 1a, with k = 512 of 128K tokens. The text averages
    attention over heads and does not say over which queries; here it is the window's, by which the
    method itself chooses. The window's own tokens and the sinks compete like all others.
    """
    prompt = check_prompt(model, input_ids)
    check_k(k, prompt.shape[1])
    return overlap_of(window_attention(model, prompt, window_size), k)


def attention_recall(
    model: PreTrainedModel,
    input_ids: Sequence[int] | Tensor,
    ks: Sequence[int],
    *,
    window_size: int = 8,
) -> dict[int, tuple[float, ...]]:
    """Return, per layer, the share of attention that its k most attended tokens receive.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: The prompt's tokens, ``[context_len]`` or ``[1, context_len]``.
        ks: Numbers of tokens, each in [1, context_len].
        window_size: Tokens of the observation window whose attention counts.

    Returns:
        For each k, a fraction in (0, 1] for every layer.

    Raises:
        TypeError: See `window_attention`; or a k is not an int.
        ValueError: See `window_attention`; or there is no k, or one is out of its range.

    Source: FastKV (arXiv 2502.01068), figure 1b.
    """
    prompt = check_prompt(model, input_ids)
    check_ks(ks, prompt.shape[1])
    return recall_of(window_attention(model, prompt, window_size), ks)


def overlap_of(saliency: Tensor, k: int) -> Overlap:
    """Return, for every two layers, the share of their k most salient tokens in common.

    Args:
        saliency: float ``[num_layers, context_len]``; among equals the earlier token is named.
        k: In [1, context_len].

    Raises:
        TypeError: ``saliency`` is no tensor of floats, or ``k`` not an int.
        ValueError: ``saliency`` has other axes, or ``k`` is out of its range.

    Example:
        >>> saliency = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.5, 0.0, 0.2, 0.3]])
        >>> overlap_of(saliency, 2).pairs
        ((1.0, 0.5), (0.5, 1.0))
    """
    check_saliency(saliency, "num_layers", "context_len")
    check_k(k, saliency.shape[1])
    named = torch.zeros(saliency.shape, dtype=torch.float64)
    for layer, row in enumerate(saliency):
        named[layer, top_tokens(row, k)] = 1.0
    pairs = (named @ named.T / k).tolist()
    return Overlap(k, tuple(tuple(row) for row in pairs))


def recall_of(saliency: Tensor, ks: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """Return, per layer, the share of its saliency that its k most salient tokens hold.

    Args:
        saliency: float ``[num_layers, context_len]``, not negative, with a positive sum.
        ks: Each in [1, context_len].

    Raises:
        TypeError: ``saliency`` is no tensor of floats, or a k not an int.
        ValueError: ``saliency`` has other axes, there is no k, or one is out of its range.

    Example:
        >>> recall_of(torch.tensor([[1.0, 5.0, 2.0, 0.0]]), [1, 3])
        {1: (0.625,), 3: (1.0,)}
    """
    check_saliency(saliency, "num_layers", "context_len")
    check_ks(ks, saliency.shape[1])
    ranked = saliency.double().sort(dim=1, descending=True).values.cumsum(dim=1)
    held = ranked / ranked[:, -1:]
    return {k: tuple(held[:, k - 1].tolist()) for k in ks}


def top_tokens(saliency: Tensor, count: int, *, protected_tail: int = 0) -> Tensor:
    """Return the indices of the ``count`` most salient tokens of a prompt, ascending.

    Args:
        saliency: float ``[context_len]``; among equals the earlier token is chosen.
        count: Tokens to choose, in [protected_tail, context_len].
        protected_tail: Trailing tokens that are always chosen.

    Returns:
        int64 ``[count]``, ascending indices.

    Raises:
        TypeError: ``saliency`` is no tensor of floats, or ``count`` not an int.
        ValueError: ``saliency`` has other axes, or ``count`` is out of its range.

    Example:
        >>> top_tokens(torch.tensor([0.1, 0.9, 0.5, 0.0]), 2, protected_tail=1)
        tensor([1, 3])
    """
    check_saliency(saliency, "context_len")
    check_k(count, len(saliency), "count")
    valid = torch.ones(1, 1, len(saliency), dtype=torch.bool)
    protected = torch.arange(len(saliency)) >= len(saliency) - protected_tail
    chosen = select_top(saliency[None, None], [count], valid=valid, protected=protected[None, None])
    return chosen[0, 0]
