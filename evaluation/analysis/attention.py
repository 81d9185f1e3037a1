"""Measure which tokens a model attends to, layer by layer.

The questions behind token-selective propagation (FastKV, arXiv 2502.01068): do layers agree on
which tokens matter (figure 1a), and how much attention do those tokens hold (figure 1b)?
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import causal_attention_sums
from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.evaluation.analysis.prefill import check_prompts, layer_saliencies
from kvpolicy.interfaces import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@attrs.frozen
class Overlap:
    """How many of their ``k`` top tokens every two model layers have in common.

    ``pairs[a][b]`` is the fraction ``|A & B| / k`` of the tokens of layer ``a`` that layer ``b``
    names too, in [0, 1].
    """

    k: int
    pairs: tuple[tuple[float, ...], ...]

    def by_distance(self) -> dict[str, tuple[float, ...]]:
        """Return the mean overlap of layers that are 0, 1, 2, ... apart: of all, and in each half.

        Example:
            >>> Overlap(4, ((1.0, 0.5, 0.25), (0.5, 1.0, 0.75), (0.25, 0.75, 1.0))).by_distance()
            {'all layers': (1.0, 0.625, 0.25)}
        """
        count, half = len(self.pairs), len(self.pairs) // 2
        parts = {"all layers": range(count)}
        if count >= 4:  # the second half begins after the default TSP layer
            parts |= {f"layers 0-{half - 1}": range(half)}
            parts |= {f"layers {half}-{count - 1}": range(half, count)}
        return {
            name: tuple(
                fmean(self.pairs[a][a + apart] for a in layers[: len(layers) - apart])
                for apart in range(len(layers))
            )
            for name, layers in parts.items()
        }


@attrs.frozen
class _WindowAttention(Scorer):
    """Scores all tokens, the window too, by the window's attention without pooling."""

    num_queries: int

    def score(self, context: LayerContext) -> Tensor:
        return causal_attention_sums(context)


def window_attention(
    model: PreTrainedModel, input_ids: Sequence[int] | Tensor, window_size: int = 8
) -> Tensor:
    """Return the share of the last tokens' attention that each prompt token gets, per layer.

    ``share[l, j] = mean over heads h and window queries i of softmax(q_i . k_j * scaling)``, every
    query over all keys up to its own. No matrix of all queries times keys is computed here (an
    ``eager`` model computes its own).

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: The prompt's tokens, ``[prompt_len]`` or ``[1, prompt_len]``.
        window_size: Tokens of the observation window, fewer than the prompt's.

    Returns:
        float64 ``[num_layers, prompt_len]`` on the CPU; each layer's shares add up to 1.
    """
    (prompt,) = check_prompts(model, [input_ids], window_size)
    return layer_saliencies(model, prompt, _WindowAttention(window_size)).double() / window_size


def topk_overlap(attention: Tensor, k: int) -> Overlap:
    """Return, for every two layers, the share of their k most attended tokens in common.

    Two layers that choose at random agree in ``k / prompt_len`` of them.

    Args:
        attention: float ``[num_layers, prompt_len]``, from `window_attention`.
        k: Tokens that each layer names, in [1, prompt_len]; of equals the earlier.

    Example:
        >>> topk_overlap(torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.5, 0.0, 0.2, 0.3]]), 2).pairs
        ((1.0, 0.5), (0.5, 1.0))

    Source: FastKV (arXiv 2502.01068), figure 1a, with k = 512 of 128K tokens. The text averages
    attention over heads and does not say over which queries; in `window_attention` it is the
    window's, by which the method itself chooses. The window and the sinks compete like all others.
    """
    check_ks([k], attention.shape[1])
    named = torch.zeros(attention.shape, dtype=torch.float64)
    named.scatter_(1, top_tokens(attention, k), 1.0)
    return Overlap(k, tuple(map(tuple, (named @ named.T / k).tolist())))


def attention_recall(attention: Tensor, ks: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """Return, per layer, the share of attention that its k most attended tokens receive.

    Args:
        attention: float ``[num_layers, prompt_len]``, from `window_attention`.
        ks: Numbers of tokens, each in [1, prompt_len].

    Example:
        >>> attention_recall(torch.tensor([[1.0, 5.0, 2.0, 0.0]]), [1, 3])
        {1: (0.625,), 3: (1.0,)}

    Source: FastKV (arXiv 2502.01068), figure 1b.
    """
    check_ks(ks, attention.shape[1])
    ranked = attention.double().sort(dim=1, descending=True).values.cumsum(dim=1)
    return {k: tuple((ranked[:, k - 1] / ranked[:, -1]).tolist()) for k in ks}


def top_tokens(saliency: Tensor, count: int) -> Tensor:
    """Return the ``count`` most salient tokens of each row, ascending; of equals the earlier."""
    ranked = saliency.sort(dim=1, descending=True, stable=True).indices
    return ranked[:, :count].sort(dim=1).values


def check_ks(ks: Sequence[int], prompt_len: int) -> None:
    """Check numbers of top tokens of a prompt."""
    for k in ks:
        if check_count("k", k, minimum=1) > prompt_len:
            raise ValueError(
                f"k must be at most the prompt's {prompt_len} tokens, got {k}; lower it or take a "
                "longer prompt"
            )
