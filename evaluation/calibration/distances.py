"""How far a drop after each layer changes the output, and the choice of a layer by it."""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, get_args

import attrs

Criterion = Literal["argmin", "earliest"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)
# A tenth of the final hidden state's length, squared.
TOLERANCE = 0.01


@attrs.frozen
class LayerDistance:
    """How far dropping tokens after one layer moves the final hidden state.

    Args:
        tsp_layer: The layer, an index from 0.
        compute_rate: Layer-tokens that prefill computes over those of a full prefill, in (0, 1].
        squared: Squared L2 distance, the mean over the calibration inputs.
        normalised: Squared L2 distance over the squared norm of full context's state, the mean
            over the calibration inputs: 0.01 is a tenth of the state's length.
        worst: The largest ``normalised`` of a calibration input.
    """

    tsp_layer: int
    compute_rate: float
    squared: float
    normalised: float
    worst: float


@attrs.frozen
class TSPDistances:
    """How far dropping tokens after each candidate layer moves the final hidden state.

    Args:
        layers: One entry for each candidate, from layer 0.
        num_layers: Layers of the model.
        tsp_rate: Fraction of the tokens that goes on.
        input_lengths: Tokens of each calibration input.
    """

    layers: tuple[LayerDistance, ...]
    num_layers: int
    tsp_rate: float
    input_lengths: tuple[int, ...]

    def choose(self, criterion: str = "argmin", tolerance: float = TOLERANCE) -> int:
        """Choose the layer after which FastKV drops tokens, by a criterion.

        Args:
            criterion: ``"argmin"`` or ``"earliest"``.
            tolerance: The ``normalised`` distance up to which an output counts as close, above 0;
                read by ``"earliest"`` only.

        Raises:
            TypeError: ``tolerance`` is no number.
            ValueError: ``criterion`` is unknown, ``tolerance`` is not above 0 and finite, or no
                candidate is within it; then names the closest.

        Example:
            >>> table = [(0, 2.0, 0.5), (1, 0.02, 0.005), (2, 0.01, 0.002)]
            >>> layers = tuple(LayerDistance(i, 0.6, far, part, part) for i, far, part in table)
            >>> distances = TSPDistances(layers, 6, 0.2, (1024,))
            >>> distances.choose("argmin"), distances.choose("earliest")
            (2, 1)
        """
        check_criterion(criterion, tolerance)
        if criterion == "argmin":
            return min(self.layers, key=lambda each: each.squared).tsp_layer
        for each in self.layers:
            if each.normalised <= tolerance:
                return each.tsp_layer
        closest = min(self.layers, key=lambda each: each.normalised)
        raise ValueError(
            f"tolerance must be reached by a TSP layer up to max_layer {self.layers[-1].tsp_layer}"
            f", but the closest, {closest.tsp_layer}, is at {closest.normalised:.3g}, got "
            f"{tolerance:g}; raise tolerance or max_layer, or choose by criterion 'argmin'"
        )

    def as_data(self) -> dict[str, Any]:
        """Return the layers' distances as a dict for JSON."""
        return {
            "num_layers": self.num_layers,
            "tsp_rate": self.tsp_rate,
            "input_lengths": list(self.input_lengths),
            "layers": [attrs.asdict(each) for each in self.layers],
        }


@attrs.frozen
class Calibration:
    """The layer chosen for FastKV to drop tokens after, with all layers' output distances.

    Args:
        layer: The chosen layer, an index from 0.
        distances: Every candidate's distance.
        criterion: ``"argmin"`` or ``"earliest"``.
        tolerance: What ``"earliest"`` took for close.
    """

    layer: int
    distances: TSPDistances
    criterion: str
    tolerance: float

    def as_data(self) -> dict[str, Any]:
        """Return the chosen layer, criterion and distances as a dict for JSON."""
        return {
            "tsp_layer": self.layer,
            "criterion": self.criterion,
            "tolerance": self.tolerance,
            **self.distances.as_data(),
        }


def check_criterion(criterion: str, tolerance: float) -> None:
    """Check the name of a criterion for choosing the drop layer, and its tolerance.

    Raises:
        TypeError: ``tolerance`` is no number.
        ValueError: ``criterion`` is unknown, or ``tolerance`` is not above 0 and finite.
    """
    if criterion not in CRITERIA:
        raise ValueError(f"criterion must be one of {', '.join(CRITERIA)}, got {criterion!r}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, numbers.Real):
        raise TypeError(f"tolerance must be a number above 0, got {tolerance!r}")
    if not 0 < float(tolerance) < math.inf:
        raise ValueError(f"tolerance must be above 0 and finite, got {tolerance}")
