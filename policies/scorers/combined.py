"""Scorers made of other scorers."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


@attrs.frozen
class ValueAwareScorer(Scorer):
    """A scorer's saliency times the norm of each token's value.

    ``saliency'[h, j] = saliency[h, j] * ||v_j||_2``: attention to a token whose value is small
    moves the output little. Meant for saliencies that are not negative, as attention is.

    Args:
        scorer: Gives the saliency.

    Raises:
        TypeError: ``scorer`` is not a `Scorer`.

    Example:
        >>> from kvpolicy.policies import WindowMaxPoolScorer
        >>> ValueAwareScorer(WindowMaxPoolScorer()).num_queries
        8

    Source: VATP, Attention Score is not All You Need for Token Importance Indicator in KV Cache
    Reduction: Value Also Matters (arXiv 2406.12335), which takes the L1 norm.
    """

    paper: ClassVar[str] = "arXiv 2406.12335"

    scorer: Scorer

    def __attrs_post_init__(self) -> None:
        _check_scorers((self.scorer,))

    @property
    def num_queries(self) -> int | None:
        """Those of the scorer."""
        return self.scorer.num_queries

    @property
    def unscored_tail(self) -> int:
        """That of the scorer."""
        return self.scorer.unscored_tail

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 of the scorer's shape; see `Scorer.score`."""
        saliency = self.scorer.score(context)
        norms: Tensor = torch.linalg.vector_norm(context.values.float(), dim=-1)
        return saliency * norms.repeat_interleave(saliency.shape[1] // context.kv_heads, dim=1)


def _as_scorers(scorers: object) -> tuple[Any, ...]:
    if not isinstance(scorers, Iterable):
        raise TypeError(f"scorers must be a sequence of Scorer, got {scorers!r}")
    return tuple(scorers)


@attrs.frozen
class _CombinedScorer(Scorer):
    """Several scorers on one layer; saliencies per KV head are repeated over their group."""

    scorers: tuple[Scorer, ...] = attrs.field(converter=_as_scorers)

    def __attrs_post_init__(self) -> None:
        _check_scorers(self.scorers)

    @property
    def num_queries(self) -> int | None:
        """As many as the scorer that looks at most."""
        wanted = [scorer.num_queries for scorer in self.scorers]
        return None if None in wanted else max(count or 0 for count in wanted)

    @property
    def unscored_tail(self) -> int:
        """The longest of the scorers'."""
        return max(scorer.unscored_tail for scorer in self.scorers)

    def _saliencies(self, context: LayerContext) -> Tensor:
        """``[scorers, batch, heads, key_len]``."""
        found = [scorer.score(self._shown_to(scorer, context)) for scorer in self.scorers]
        heads = max(saliency.shape[1] for saliency in found)
        return torch.stack(
            [each.repeat_interleave(heads // each.shape[1], dim=1) for each in found]
        )

    def _shown_to(self, scorer: Scorer, context: LayerContext) -> LayerContext:
        """The layer with no more queries than the scorer asks for."""
        if scorer.num_queries is None or scorer.num_queries >= context.query_len:
            return context
        first = context.query_len - scorer.num_queries
        return attrs.evolve(context, queries=context.queries[:, :, first:])


def _as_weights(weights: object) -> tuple[float, ...]:
    if not isinstance(weights, Iterable):
        raise TypeError(f"weights must be a sequence of numbers, got {weights!r}")
    found = []
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, (numbers.Real, Tensor)):
            raise TypeError(f"weights must be numbers, got {weight!r} of {type(weight).__name__}")
        if not abs(float(weight)) <= torch.finfo(torch.float32).max:
            raise ValueError(f"weights must be finite in float32, got {float(weight)}")
        found.append(float(weight))
    return tuple(found)


@attrs.frozen
class SumScorer(_CombinedScorer):
    """The sum of several saliencies, each with a weight.

    Args:
        scorers: At least one.
        weights: One for each, finite; all 1 if None.

    Raises:
        TypeError: One of ``scorers`` is not a `Scorer`, or a weight not a number.
        ValueError: There are none, not as many weights, or a weight is not finite in float32.

    Example:
        >>> from kvpolicy.policies import LastQueryScorer, WindowMaxPoolScorer
        >>> SumScorer([WindowMaxPoolScorer(), LastQueryScorer()], weights=[1.0, 8.0]).num_queries
        8
    """

    weights: tuple[float, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_as_weights)
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.weights is not None and len(self.weights) != len(self.scorers):
            raise ValueError(
                f"weights must be one for each of {len(self.scorers)} scorers, got {self.weights}"
            )

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, query_heads or kv_heads, key_len]``; see `Scorer.score`."""
        saliencies = self._saliencies(context)
        if self.weights is None:
            return saliencies.sum(dim=0)
        weights = torch.tensor(self.weights, dtype=torch.float32, device=saliencies.device)
        return torch.einsum("s,sbhk->bhk", weights, saliencies)


@attrs.frozen
class MaxScorer(_CombinedScorer):
    """The largest of several saliencies: a token matters if it matters to any.

    Args:
        scorers: At least one.

    Raises:
        TypeError: One of ``scorers`` is not a `Scorer`.
        ValueError: There are none.

    Example:
        >>> from kvpolicy.policies import AccumulatedAttentionScorer, WindowMaxPoolScorer
        >>> MaxScorer([WindowMaxPoolScorer(), AccumulatedAttentionScorer()]).num_queries is None
        True
    """

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, query_heads or kv_heads, key_len]``; see `Scorer.score`."""
        return self._saliencies(context).amax(dim=0)


def _check_scorers(scorers: tuple[Scorer, ...]) -> None:
    if not scorers:
        raise ValueError("scorers must hold at least one Scorer, got none")
    for scorer in scorers:
        if not isinstance(scorer, Scorer):
            raise TypeError(f"scorer must be a Scorer, got {scorer!r}")
