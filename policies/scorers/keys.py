"""Scores tokens by their keys alone, without queries."""

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


@attrs.frozen
class KeyNormScorer(Scorer):
    """Scores tokens by minus the norm of their keys: small keys tend to draw attention.

    ``saliency[h, j] = -||k_j||_2`` per KV head ``h``, after rotary embedding, which keeps norms.

    Example:
        >>> KeyNormScorer().num_queries
        0

    Source: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression
    (arXiv 2406.11430). Every layer is treated alike here.
    """

    paper = "arXiv 2406.11430"

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        norms: Tensor = torch.linalg.vector_norm(context.keys.float(), dim=-1)
        return -norms


@attrs.frozen
class KeyDiffScorer(Scorer):
    """Scores tokens by how little their keys resemble the layer's other keys.

    ``saliency[h, j] = -cos(k_j, m)`` with ``m`` the mean of ``k_i / ||k_i||`` over the row's tokens
    ``i``, per KV head ``h``, after rotary embedding.

    Example:
        >>> KeyDiffScorer().num_queries
        0

    Source: KeyDiff: Key Similarity-Based KV Cache Eviction (arXiv 2504.15364).
    """

    paper = "arXiv 2504.15364"

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        directions = functional.normalize(context.keys.float(), dim=-1)
        real = context.valid[..., None]
        mean = (directions * real).sum(dim=2, keepdim=True) / real.sum(dim=2, keepdim=True)
        return -(directions * functional.normalize(mean, dim=-1)).sum(dim=-1)
