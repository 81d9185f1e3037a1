"""Drops the less salient image tokens after one layer."""

import attrs
from torch import Tensor

from kvpolicy.checks import check_count, check_rate
from kvpolicy.context import LayerContext
from kvpolicy.kinds import VISUAL
from kvpolicy.policies.propagation.shared import RankingPropagation, within


@attrs.frozen
class VisualTokenPropagation(RankingPropagation):
    """Drops visual tokens after one layer, except the most salient; all text tokens go on.

    The saliency is the mean over all query heads of the layer; tokens keep their original rotary
    positions. Here ``tsp_rate`` is a fraction of the visual tokens that are new and that reached
    the layer, not of the context: a question in a later turn loses nothing, a further image as much
    as the first, and stages of `StagedPropagation` multiply. A model that reads text only has
    nothing to drop.

    Args:
        tsp_rate: Fraction of the new visual tokens at that layer that goes on, in (0, 1].
        tsp_layer: Index of the layer after which tokens are dropped, from 0.
        window_size: Trailing tokens that always go on, of whatever kind, at least 1.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range.

    Example:
        >>> VisualTokenPropagation(tsp_layer=1).acting_layers(num_layers=32)
        frozenset({1})

    Source: FastV (arXiv 2403.06764), section 4; PyramidDrop (arXiv 2410.17247), section 3.
    """

    paper = "arXiv 2403.06764"

    tsp_rate: float = 0.5
    tsp_layer: int = attrs.field(default=1, kw_only=True)
    window_size: int = attrs.field(default=1, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("tsp_layer", self.tsp_layer)
        check_rate("tsp_rate", self.tsp_rate)
        # At least the last token: the next one is predicted from it.
        check_count("window_size", self.window_size, minimum=1)

    @property
    def protected_tail(self) -> int:
        """The number of last tokens that score the others and always go on to later layers."""
        return self.window_size

    def protected(self, context: LayerContext) -> Tensor:
        """Mark the tokens that always go on: the last ones and all that are not visual."""
        return super().protected(context) | (context.new_valid & ~context.is_new_kind(*VISUAL))

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        """Return the layer after which tokens are dropped; ValueError if it is not in the model."""
        return within("tsp_layer", self.tsp_layer, num_layers)

    def layer_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return 1 for every layer, an upper bound: prompts differ in their visual tokens."""
        self.acting_layers(num_layers)
        return [1.0] * num_layers

    def _counts(self, context: LayerContext, protected: Tensor) -> list[int]:
        visual = context.is_new_kind(*VISUAL)
        counts = zip(
            visual.sum(dim=1).tolist(),
            (visual & protected).sum(dim=1).tolist(),
            context.new_valid.sum(dim=1).tolist(),
            strict=True,
        )
        return [
            new - images + max(int(images * self.tsp_rate), fixed) for images, fixed, new in counts
        ]
