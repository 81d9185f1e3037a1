"""Measure which tokens a model attends to, layer by layer.

Do layers agree on which tokens matter, and how much attention do those tokens hold?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    ``pairs[a][b]`` is the fraction ``|A & B| / k`` of the tokens of layer ``layers[a]`` that
    ``layers[b]`` names too, in [0, 1].
    """

    k: int
    layers: tuple[int, ...]
    pairs: tuple[tuple[float, ...], ...]

    def by_distance(self) -> dict[str, tuple[float, ...]]:
        """Return the mean overlap of layers 0, 1, 2, ... apart: of all, and in each half."""
        count, half = len(self.pairs), len(self.pairs) // 2
        parts = {"all layers": range(count)}
        if count >= 4:  # the second half begins after the default TSP layer
            for part in (range(half), range(half, count)):
                parts[f"layers {self.layers[part[0]]}-{self.layers[part[-1]]}"] = part
        return {
            name: tuple(
                fmean(self.pairs[a][a + apart] for a in part[: len(part) - apart])
                for apart in range(len(part))
            )
            for name, part in parts.items()
        }


@attrs.frozen
class _WindowAttention(Scorer):
    """Scores all tokens, the window too, by the window's attention without pooling."""

    num_queries: int

    def score(self, context: LayerContext) -> Tensor:
        return causal_attention_sums(context)


def window_attention(
    model: PreTrainedModel, input_ids: Sequence[int] | Tensor, window_size: int = 8
) -> dict[int, Tensor]:
    """Return the share of the last tokens' attention that each prompt token gets, per layer.

    ``share[l][j] = mean over heads h and window queries i of softmax(q_i . k_j * scaling)``, every
    query over all keys up to its own. No matrix of all queries times keys is computed here (an
    ``eager`` model computes its own).

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: The prompt's tokens, ``[prompt_len]`` or ``[1, prompt_len]``.
        window_size: Tokens of the observation window, fewer than the prompt's.

    Returns:
        By layer that sees the whole context float64 ``[prompt_len]`` on the CPU; it adds up to 1.
    """
    (prompt,) = check_prompts(model, [input_ids], window_size)
    sums = layer_saliencies(model, prompt, _WindowAttention(window_size))
    return {layer: row.double() / window_size for layer, row in sums.items()}


def topk_overlap(attention: Mapping[int, Tensor], k: int) -> Overlap:
    """Return, for every two layers, the share of their k most attended tokens in common.

    Two layers that choose at random agree in ``k / prompt_len`` of them.

    Args:
        attention: By layer float ``[prompt_len]``, from `window_attention`.
        k: Tokens that each layer names, in [1, prompt_len]; of equals the earlier.

    Example:
        >>> rows = {0: torch.tensor([0.5, 0.3, 0.2, 0.0]), 1: torch.tensor([0.5, 0.0, 0.2, 0.3])}
        >>> topk_overlap(rows, 2).pairs
        ((1.0, 0.5), (0.5, 1.0))

    Source: FastKV (arXiv 2502.01068), figure 1a, with k = 512 of 128K tokens. The text averages
    attention over heads and does not say over which queries; in `window_attention` it is the
    window's, by which the method itself chooses. The window and the sinks compete like all others.
    """
    rows = torch.stack([*attention.values()])
    check_ks([k], rows.shape[1])
    named = torch.zeros(rows.shape, dtype=torch.float64).scatter_(1, top_tokens(rows, k), 1.0)
    return Overlap(k, tuple(attention), tuple(map(tuple, (named @ named.T / k).tolist())))


def attention_recall(
    attention: Mapping[int, Tensor], ks: Sequence[int]
) -> dict[int, tuple[float, ...]]:
    """Return, per layer, the share of attention that its k most attended tokens receive.

    Args:
        attention: By layer float ``[prompt_len]``, from `window_attention`.
        ks: Numbers of tokens, each in [1, prompt_len].

    Example:
        >>> attention_recall({0: torch.tensor([1.0, 5.0, 2.0, 0.0])}, [1, 3])
        {1: (0.625,), 3: (1.0,)}

    Source: FastKV (arXiv 2502.01068), figure 1b.
    """
    rows = torch.stack([*attention.values()])
    check_ks(ks, rows.shape[1])
    ranked = rows.double().sort(dim=1, descending=True).values.cumsum(dim=1)
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
