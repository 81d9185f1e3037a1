"""PyramidKV, which is SnapKV with budgets that fall with depth, and SpireKV."""

from dataclasses import dataclass, field

from .methods import Choice, LayerView, SnapKV, pass_on
from .selection import budget


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """A SnapKV whose budget is highest at the first layer and lowest at the last."""

    beta: int = 20
    floor: int = field(default=0, kw_only=True)

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
        shares = free_places(mean - protected, most, layer.num_layers, self.beta, self.floor)
        return min(available, protected + shares[layer.layer_idx])


@dataclass(frozen=True)
class SpireKV(PyramidKV):
    """A PyramidKV that passes on only the most salient new tokens after one layer.

    Every layer has places for a salient token and half its neighbours.
    """

    tsp_layer: int = 1
    tsp_rate: float = 0.1
    peak_first: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        """Sets the floor."""
        object.__setattr__(self, "floor", 1 + self.kernel_size // 2)

    def choose(self, layer: LayerView) -> Choice:
        choice = super().choose(layer)
        if layer.layer_idx != self.tsp_layer:
            return choice
        passed, gap = pass_on(self, layer, self.tsp_rate)
        return Choice(choice.kept, passed, min(choice.margin, gap))


def free_places(mean: int, most: int, num_layers: int, beta: int, floor: int = 0) -> list[int]:
    """Splits `num_layers * mean` places over the layers.

    A layer of the first half gets `mean * (beta - 1) * (num_layers - 1 - 2 * layer)` over
    `beta * (num_layers - 1)`, rounded down, above the mean, but `most` at most; the layer as far
    from the end gets as much below the mean; one in the middle gets the mean. If that leaves the
    last layer less than `floor`, the first gets only `mean - floor` above the mean, or nothing, and
    the others in proportion.
    """
    places = [mean] * num_layers
    for layer in range(num_layers // 2):
        steps, most_steps = num_layers - 1 - 2 * layer, num_layers - 1
        above = mean * (beta - 1) * steps // (beta * most_steps)
        if mean * (beta - 1) > beta * (mean - floor):  # (beta - 1) / beta of the mean is too much
            above = max(mean - floor, 0) * steps // most_steps
        places[layer] = min(mean + above, most)
        places[num_layers - 1 - layer] = 2 * mean - places[layer]
    return places
