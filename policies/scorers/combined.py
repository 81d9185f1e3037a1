"""Combines several scorers by sum or by maximum."""

from __future__ import annotations

import abc
import numbers
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import as_tuple
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


def _as_scorers(scorers: object) -> tuple[Any, ...]:
    return as_tuple("scorers", "Scorer", scorers)


@attrs.frozen
class _CombinedScorer(Scorer):
    """Base of scorers that combine several scorers' saliency into one."""

    scorers: tuple[Scorer, ...] = attrs.field(converter=_as_scorers)

    def __attrs_post_init__(self) -> None:
        _check_scorers(self.scorers)

    @property
    def num_queries(self) -> int | None:
        """The largest number of queries that any of the combined scorers reads."""
        wanted = [scorer.num_queries for scorer in self.scorers]
        return None if None in wanted else max(count or 0 for count in wanted)

    @property
    def unscored_tail(self) -> int:
        """The largest number of last tokens that any of the combined scorers leaves unscored."""
        return max(scorer.unscored_tail for scorer in self.scorers)

    @property
    def state_size(self) -> int:
        """The number of values per key that all combined scorers together keep as state."""
        return sum(scorer.state_size for scorer in self.scorers)

    @property
    def needs_rotary(self) -> bool:
        """True if any of the combined scorers needs the rotary embedding."""
        return any(scorer.needs_rotary for scorer in self.scorers)

    @property
    def needs_output_weight(self) -> bool:
        """True if any of the combined scorers reads the output weights."""
        return any(scorer.needs_output_weight for scorer in self.scorers)

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, query_heads or kv_heads, key_len]``; see `Scorer.score`."""
        return self._combined([each.score(shown) for each, shown in self._shown(context)])

    def update(self, context: LayerContext) -> tuple[Tensor, Tensor]:
        """Update the states of all combined scorers, and combine their saliency."""
        found = [each.update(shown) for each, shown in self._shown(context)]
        state = torch.cat([of_scorer for _, of_scorer in found], dim=-1)
        return self._combined([saliency for saliency, _ in found]), state

    def _combined(self, found: list[Tensor]) -> Tensor:
        """Combine all scorers' saliency into one tensor, repeating it where it is per KV head."""
        heads = max(saliency.shape[1] for saliency in found)
        repeated = [each.repeat_interleave(heads // each.shape[1], dim=1) for each in found]
        return self._of_all(torch.stack(repeated))

    @abc.abstractmethod
    def _of_all(self, saliencies: Tensor) -> Tensor:
        """Combine saliency stacked as ``[scorers, batch, heads, key_len]`` along its first axis."""

    def _shown(self, context: LayerContext) -> Iterator[tuple[Scorer, LayerContext]]:
        """Yield each combined scorer, with a layer context cut to the inputs it reads."""
        end = 0
        for scorer in self.scorers:
            start, end = end, end + scorer.state_size
            before = None if context.state is None else context.state[..., start:end]
            shown = context.showing(scorer.num_queries)
            yield scorer, attrs.evolve(shown, state=before if scorer.state_size else None)


def _as_weights(weights: object) -> tuple[float, ...]:
    found = []
    for weight in as_tuple("weights", "numbers", weights):
        if isinstance(weight, bool) or not isinstance(weight, (numbers.Real, Tensor)):
            raise TypeError(f"weights must be numbers, got {weight!r} of {type(weight).__name__}")
        if not abs(float(weight)) <= torch.finfo(torch.float32).max:
            raise ValueError(f"weights must be finite in float32, got {float(weight)}")
        found.append(float(weight))
    return tuple(found)


@attrs.frozen
class SumScorer(_CombinedScorer):
    """Scores tokens by a weighted sum of several scorers' saliency.

    Args:
        scorers: At least one.
        weights: One for each, finite; all 1 if None.

    Raises:
        TypeError: One of ``scorers`` is not a `Scorer`, or a weight not a number.
        ValueError: There are none, not as many weights, a weight is not finite in float32, or a
            scorer looks at the saliency of the layers before.

    Example:
        >>> from kvpolicy.policies import LastQueryScorer, WindowMaxPoolScorer
        >>> SumScorer([WindowMaxPoolScorer(), LastQueryScorer()], weights=[1.0, 8.0]).num_queries
        8
    """

    weights: tuple[float, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_as_weights), kw_only=True
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.weights is not None and len(self.weights) != len(self.scorers):
            raise ValueError(
                f"weights must be one for each of {len(self.scorers)} scorers, got {self.weights}"
            )

    def _of_all(self, saliencies: Tensor) -> Tensor:
        if self.weights is None:
            return saliencies.sum(dim=0)
        weights = torch.tensor(self.weights, dtype=torch.float32, device=saliencies.device)
        return torch.einsum("s,sbhk->bhk", weights, saliencies)


@attrs.frozen
class MaxScorer(_CombinedScorer):
    """Scores tokens by the largest saliency that any of several scorers gives them.

    Args:
        scorers: At least one.

    Raises:
        TypeError: One of ``scorers`` is not a `Scorer`.
        ValueError: There are none, or one looks at the saliency of the layers before.

    Example:
        >>> from kvpolicy.policies import AccumulatedAttentionScorer, WindowMaxPoolScorer
        >>> MaxScorer([WindowMaxPoolScorer(), AccumulatedAttentionScorer()]).num_queries is None
        True
    """

    def _of_all(self, saliencies: Tensor) -> Tensor:
        return saliencies.amax(dim=0)


def _check_scorers(scorers: tuple[Scorer, ...]) -> None:
    if not scorers:
        raise ValueError("scorers must hold at least one Scorer, got none")
    for scorer in scorers:
        if not isinstance(scorer, Scorer):
            raise TypeError(f"scorer must be a Scorer, got {scorer!r}")
        if scorer.history_layers:
            raise ValueError(
                "scorers must not look at the saliency of the layers before, which is that of all "
                f"of them together, got {scorer} with history_layers={scorer.history_layers}"
            )
