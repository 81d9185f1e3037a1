"""`Scorer`, the interface of a policy's first part, and the sums and maxima of scorers."""

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
from kvpolicy.layer_inputs import DecodingInputs
from kvpolicy.part import Part


class Scorer(Part, abc.ABC):
    """Base of scorers: gives every token of a layer a saliency, larger for tokens worth keeping.

    Scorers join by operators: ``a + b`` and ``0.5 * a`` are a `SumScorer`, ``a | b`` is a
    `MaxScorer`. Sums of sums are one sum, and weights multiply.
    """

    @property
    def num_queries(self) -> int | None:
        """The number of last queries that `score` reads: 0 for none, None for all."""
        return 0

    @property
    def unscored_tail(self) -> int:
        """The number of last tokens that `score` leaves out because they are always kept."""
        return 0

    @property
    def state_size(self) -> int:
        """The number of values that the scorer stores per key between evictions; 0 for none."""
        return 0

    @property
    def accumulates(self) -> bool:
        """True if calling `update` on one block of queries after another gives the full saliency.

        After the last block, `update` must return what `score` returns for all queries at once, or
        the mean of it over each KV group. A prompt that is read in chunks then holds the scorer's
        state in place of its queries. A class that overrides `score`, `update`, `state_size` or
        `num_queries` has to declare this again; otherwise the declaration is ignored.
        """
        return False

    def update(self, context: LayerContext) -> tuple[Tensor, Tensor]:
        """Return the saliency and the scorer's new state, for eviction while decoding.

        Called once for every choice, the prompt's included: ``context.decoding.state`` is the
        state after the previous choice, ``context.queries`` are the queries of all tokens since.
        Nothing is evicted between two choices, so these queries have attended to all keys in the
        context, up to their own positions.

        Args:
            context: The layer; nothing in it may be modified.

        Returns:
            The saliency, as `score` would return it; and the state, float32 ``[batch, kv_heads,
            key_len, state_size]``, whose entries for evicted keys are dropped.
        """
        return self.score(context), context.keys.new_empty(
            context.batch, context.kv_heads, context.key_len, 0, dtype=torch.float32
        )

    @abc.abstractmethod
    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency of every key: larger means keep.

        Args:
            context: The layer; nothing in it may be modified.

        Returns:
            Finite float32 ``[batch, query_heads or kv_heads, key_len]``, a new tensor; values on
            padding are ignored.
        """

    def __add__(self, other: Scorer) -> SumScorer:
        """Return a scorer of the sum of both scorers' saliency; see `SumScorer`."""
        return _sum(self, _operand("+", other, self))

    def __radd__(self, other: object) -> SumScorer:
        return _sum(_operand("+", other, self), self)

    def __or__(self, other: Scorer) -> MaxScorer:
        """Return a scorer of the larger of both scorers' saliency; see `MaxScorer`."""
        return _largest(self, _operand("|", other, self))

    def __ror__(self, other: object) -> MaxScorer:
        return _largest(_operand("|", other, self), self)

    def __mul__(self, weight: float) -> SumScorer:
        """Return a scorer of the saliency times a number; see `SumScorer`."""
        if isinstance(weight, Scorer):
            raise TypeError(
                f"* must have a number and a Scorer, such as 0.5 * {type(self).__name__}(), got "
                f"{self} * {weight}; add scorers by + or take their maximum by |"
            )
        (weight,) = _as_weights([weight])
        scorers, weights = _terms(self)
        return SumScorer(scorers, weights=[weight * each for each in weights])

    __rmul__ = __mul__


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
    def inner_parts(self) -> tuple[Scorer, ...]:
        """The combined scorers."""
        return self.scorers

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
            shown = context._showing(scorer.num_queries)
            state, places = shown.decoding.state, shown.decoding.query_positions
            own = None if state is None or not scorer.state_size else state[..., start:end]
            yield scorer, shown._shown(decoding=DecodingInputs(own, places))


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
        >>> both = SumScorer([WindowMaxPoolScorer(), LastQueryScorer()], weights=[1.0, 8.0])
        >>> both.num_queries, both == WindowMaxPoolScorer() + 8 * LastQueryScorer()
        (8, True)
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
        >>> highest = MaxScorer([WindowMaxPoolScorer(), AccumulatedAttentionScorer()])
        >>> highest == WindowMaxPoolScorer() | AccumulatedAttentionScorer()
        True
    """

    def _of_all(self, saliencies: Tensor) -> Tensor:
        return saliencies.amax(dim=0)


def _operand(sign: str, other: object, scorer: Scorer) -> Scorer:
    """Return the other operand of a scorer; raise TypeError if it is no scorer."""
    if isinstance(other, Scorer):
        return other
    hint = "multiply a scorer by a number, such as 0.5 * scorer"
    if isinstance(other, type):
        hint = f"make one first: {other.__name__}()"
    elif isinstance(other, int) and other == 0:  # the start value of `sum`
        hint = "for the sum of a list of scorers use SumScorer(scorers)"
    raise TypeError(
        f"{sign} must have a Scorer on both sides, got {other!r} beside {scorer}; {hint}"
    )


def _terms(scorer: Scorer) -> tuple[tuple[Scorer, ...], tuple[float, ...]]:
    """Return the scorers and weights of a sum; any other scorer counts as one term of weight 1."""
    if type(scorer) is not SumScorer:  # a subclass may sum in another way
        return (scorer,), (1.0,)
    return scorer.scorers, scorer.weights or (1.0,) * len(scorer.scorers)


def _sum(first: Scorer, second: Scorer) -> SumScorer:
    both = [_terms(each) for each in (first, second)]
    scorers, weights = (sum(each, ()) for each in zip(*both, strict=True))
    return SumScorer(scorers, weights=None if set(weights) == {1.0} else weights)


def _largest(first: Scorer, second: Scorer) -> MaxScorer:
    both = [each.scorers if type(each) is MaxScorer else (each,) for each in (first, second)]
    return MaxScorer([*both[0], *both[1]])


def _check_scorers(scorers: tuple[Scorer, ...]) -> None:
    if not scorers:
        raise ValueError("scorers must hold at least one Scorer, got none")
    for scorer in scorers:
        if not isinstance(scorer, Scorer):
            raise TypeError(f"scorer must be a Scorer, got {scorer!r}")
        if scorer.history_layers:
            raise ValueError(
                "scorers must not read the saliency of earlier layers, since that is the "
                f"saliency of all of them together, got {scorer} with "
                f"history_layers={scorer.history_layers}"
            )
