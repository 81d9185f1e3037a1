"""PyramidKV, which is SnapKV with budgets that fall with depth, and SpireKV."""

from dataclasses import dataclass

from .methods import Choice, LayerView, SnapKV, pass_on
from .selection import budget


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """A SnapKV whose budget is highest at the first layer and lowest at the last.

    Attributes:
        beta: at least 1; a mean of `f` free places falls from about `f * (2 - 1 / beta)` to about
            `f / beta`.
    """

    beta: int = 20

    def count(self, layer: LayerView, available: int, protected: int) -> int:
        """Returns the layer's share of the entries that SnapKV would keep in all layers."""
        mean = budget(
            self.retention_rate,
            self.retention_tokens,
            seen=layer.seen,
            available=layer.seen,
            protected=protected,
        )
        most = layer.seen - protected
        shares = free_places(mean - protected, most, layer.num_layers, self.beta)
        return min(available, protected + shares[layer.layer_idx])


@dataclass(frozen=True)
class SpireKV(PyramidKV):
    """A PyramidKV that passes on only the most salient new tokens after one layer.

    Attributes:
        tsp_layer: the layer after which tokens are dropped.
        tsp_rate: fraction of all tokens seen that is passed on.
    """

    tsp_layer: int = 1
    tsp_rate: float = 0.1

    def choose(self, layer: LayerView) -> Choice:
        """Keeps tokens like PyramidKV; at `tsp_layer`, also chooses the tokens to pass on."""
        choice = super().choose(layer)
        if layer.layer_idx != self.tsp_layer:
            return choice
        passed, gap = pass_on(self, layer, self.tsp_rate)
        return Choice(choice.kept, passed, min(choice.margin, gap))


def free_places(mean: int, most: int, num_layers: int, beta: int) -> list[int]:
    """Splits `num_layers * mean` places over the layers.

    A layer of the first half gets `mean * (beta - 1) * (num_layers - 1 - 2 * layer)` over
    `beta * (num_layers - 1)`, rounded down, above the mean, but `most` at most; the layer as far
    from the end gets as much below the mean; one in the middle gets the mean.

    Example:
        >>> free_places(8, 18, 4, 4)
        [14, 10, 6, 2]
    """
    places = [mean] * num_layers
    for layer in range(num_layers // 2):
        above = mean * (beta - 1) * (num_layers - 1 - 2 * layer) // (beta * (num_layers - 1))
        places[layer] = min(mean + above, most)
        places[num_layers - 1 - layer] = 2 * mean - places[layer]
    return places
