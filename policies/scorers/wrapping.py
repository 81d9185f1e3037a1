"""Base of scorers that change another scorer's saliency."""

import abc

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_kind
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


@attrs.frozen
class WrappingScorer(Scorer):
    """Base of scorers that change another scorer's saliency."""

    scorer: Scorer

    def __attrs_post_init__(self) -> None:
        check_kind("scorer", self.scorer, Scorer)

    @property
    def num_queries(self) -> int | None:
        """The number of queries that the wrapped scorer reads."""
        return self.scorer.num_queries

    @property
    def unscored_tail(self) -> int:
        """The number of last tokens that the wrapped scorer leaves without a saliency."""
        return self.scorer.unscored_tail

    @property
    def state_size(self) -> int:
        """The number of values per key that the wrapped scorer keeps as state."""
        return self.scorer.state_size

    @property
    def inner_parts(self) -> tuple[Scorer, ...]:
        """The wrapped scorer."""
        return (self.scorer,)

    def update(self, context: LayerContext) -> tuple[Tensor, Tensor]:
        """Update the wrapped scorer's state and change its saliency; see `Scorer.update`."""
        saliency, state = self.scorer.update(context)
        return self._changed(saliency, context), state

    def score(self, context: LayerContext) -> Tensor:
        """Return the wrapped scorer's saliency after the change, in float32."""
        return self._changed(self.scorer.score(context), context)

    @abc.abstractmethod
    def _changed(self, saliency: Tensor, context: LayerContext) -> Tensor:
        """Return a changed copy of the wrapped scorer's saliency."""


@attrs.frozen
class ValueAwareScorer(WrappingScorer):
    """Multiplies another scorer's saliency by the norm of each token's value vector.

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

    paper = "arXiv 2406.12335"

    def _changed(self, saliency: Tensor, context: LayerContext) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(context.values.float(), dim=-1)
        return saliency * norms.repeat_interleave(saliency.shape[1] // context.kv_heads, dim=1)
