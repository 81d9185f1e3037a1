"""Choose the layer after which tokens are dropped, by how far the drop changes the output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count
from kvpolicy.errors import ShapeError
from kvpolicy.evaluation.calibration.distances import (
    TOLERANCE,
    Calibration,
    Criterion,
    LayerDistance,
    TSPDistances,
    check_criterion,
)
from kvpolicy.evaluation.calibration.states import FinalStates, decoder_of, final_states
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.policies import TokenSelectivePropagation, WindowMaxPoolScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def select_tsp_layer(
    model: PreTrainedModel,
    calibration_inputs: Sequence[Tensor],
    tsp_rate: float = 0.2,
    max_layer: int | None = None,
    *,
    criterion: Criterion = "argmin",
    tolerance: float = TOLERANCE,
    window_size: int = 8,
    kernel_size: int = 7,
    protect: int = 0,
    progress: Progress = silent,
) -> Calibration:
    """Choose the layer after which FastKV drops tokens, by how little the output changes.

    For every candidate ``L`` the distance is ``mean over inputs of |h_full - h_L|^2``, where ``h``
    is the hidden state of the input's last token after the final norm: under full context, and with
    `TokenSelectivePropagation` after layer ``L``, nothing evicted. That state alone makes the
    next token's logits; the other tokens' final states serve nothing but it, and are not even
    there where tokens are dropped. Two criteria:

    - ``"argmin"``, the paper's equation: the candidate with the smallest distance, the earliest
      of equals. Distances tend to fall towards later layers (after the last one a drop changes
      nothing), so that ``max_layer``, the price in computation, often decides.
    - ``"earliest"``, the paper's text: the first candidate whose distance, divided by
      ``|h_full|^2`` for each input, is at most ``tolerance``; the cheapest that is good enough.

    Each input costs one full prefill, and for every candidate the layers after it, run on the
    tokens that go on; inputs are run one at a time.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        calibration_inputs: Token ids: int64 tensors ``[len]`` or ``[1, len]``, each longer than
            ``window_size``, without padding. Take prompts like those to be read, ending as they do
            in the question, and others than those that accuracy is reported on.
        tsp_rate: Fraction of the tokens that goes on, in (0, 1].
        max_layer: The last candidate, a layer index; None for ``num_layers // 2 - 1``, FastKV's
            default layer.
        criterion: How to choose.
        tolerance: The normalised distance that ``"earliest"`` takes for close, above 0; 0.01 is a
            tenth of the state's length.
        window_size: Tokens of the observation window, at least 1.
        kernel_size: Width of the max-pooling, odd.
        protect: First tokens that always go on, at least 0.
        progress: Told of every input.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, an input is unfit, the model is in training
            mode or returns no finite numbers, or no candidate is within ``tolerance``. To keep the
            table then, use `measure_tsp_distances` and `TSPDistances.choose`.
        UnsupportedModelError: `PolicyCache` cannot be attached to the model.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1)
        >>> model = LlamaForCausalLM(config).eval()
        >>> calibration = select_tsp_layer(model, [torch.arange(40)], max_layer=3)
        >>> calibration.layer, calibration.distances.layers[3].squared
        (3, 0.0)

    Source: FastKV (arXiv 2502.01068), section 3, the choice of the TSP layer. The normalised
    distance is ours; the paper gives no number for "close".
    """
    check_criterion(criterion, tolerance)
    distances = measure_tsp_distances(
        model,
        calibration_inputs,
        tsp_rate,
        max_layer,
        window_size=window_size,
        kernel_size=kernel_size,
        protect=protect,
        progress=progress,
    )
    return Calibration(
        distances.choose(criterion, tolerance), distances, criterion, float(tolerance)
    )


def measure_tsp_distances(
    model: PreTrainedModel,
    calibration_inputs: Sequence[Tensor],
    tsp_rate: float = 0.2,
    max_layer: int | None = None,
    *,
    window_size: int = 8,
    kernel_size: int = 7,
    protect: int = 0,
    progress: Progress = silent,
) -> TSPDistances:
    """Return how far a drop after each layer moves the output, the basis of `select_tsp_layer`."""
    scorer = WindowMaxPoolScorer(window_size, kernel_size=kernel_size)
    propagation = TokenSelectivePropagation(
        tsp_layer=0, tsp_rate=tsp_rate, window_size=window_size, protect=protect
    )
    num_layers = len(decoder_of(model).layers)
    if model.training:
        raise ValueError("model must be in evaluation mode, got training mode; call model.eval()")
    last = _last_candidate(max_layer, num_layers)
    inputs = _check_inputs(calibration_inputs, window_size, model)
    squares: dict[int, _Squares] = {}
    # The longest input first, so that it fails at once if it does not fit the model or the memory.
    for index in sorted(range(len(inputs)), key=lambda each: -inputs[each].shape[1]):
        progress("calibration", len(squares), len(inputs))
        ids = inputs[index].to(model.device)
        states = final_states(model, ids, scorer, propagation, last)
        squares[index] = _squares_of(states, f"calibration_inputs[{index}]")
    progress("calibration", len(inputs), len(inputs))
    layers = []
    for layer in range(last + 1):
        rates = attrs.evolve(propagation, tsp_layer=layer).layer_rates(num_layers)
        layers.append(_layer_distance(layer, fmean(rates), list(squares.values())))
    lengths = tuple(each.shape[1] for each in inputs)
    return TSPDistances(tuple(layers), num_layers, float(tsp_rate), lengths)


@attrs.frozen
class _Squares:
    """For one input, the output's squared change by candidate layer, and its squared norm."""

    distances: list[float]
    norm: float


def _squares_of(states: FinalStates, name: str) -> _Squares:
    # In float64 on the CPU: a distance is a small difference of states that may be in bfloat16.
    full, *dropped = (each.float().cpu().double() for each in (states.full, *states.dropped))
    squares = _Squares(
        [float((each - full).square().sum()) for each in dropped], float(full @ full)
    )
    if not (squares.norm > 0 and math.isfinite(squares.norm + math.fsum(squares.distances))):
        raise ValueError(
            f"model must return finite final hidden states other than 0, but for {name} it does "
            "not; try another dtype"
        )
    return squares


def _layer_distance(layer: int, compute_rate: float, squares: Sequence[_Squares]) -> LayerDistance:
    normalised = [each.distances[layer] / each.norm for each in squares]
    return LayerDistance(
        tsp_layer=layer,
        compute_rate=compute_rate,
        squared=fmean(each.distances[layer] for each in squares),
        normalised=fmean(normalised),
        worst=max(normalised),
    )


def _last_candidate(max_layer: int | None, num_layers: int) -> int:
    if max_layer is None:
        (default,) = TokenSelectivePropagation().acting_layers(num_layers)
        return default
    if check_count("max_layer", max_layer) >= num_layers:
        raise ValueError(
            f"max_layer must be in [0, {num_layers - 1}] for a model of {num_layers} layers, got "
            f"{max_layer}"
        )
    return max_layer


def _check_inputs(inputs: object, window_size: int, model: PreTrainedModel) -> list[Tensor]:
    """Check the calibration inputs' token ids, and return each as a tensor ``[1, len]``."""
    if isinstance(inputs, Tensor) or not isinstance(inputs, Sequence):
        raise TypeError(
            "calibration_inputs must be a sequence of int64 tensors [len] or [1, len], got "
            f"{type(inputs).__name__}; pass a list"
        )
    if not inputs:
        raise ValueError("calibration_inputs must hold at least one input, got none")
    embeddings: Any = model.get_input_embeddings()
    vocab_size = int(embeddings.weight.shape[0])
    return [
        _check_ids(f"calibration_inputs[{index}]", ids, window_size, vocab_size)
        for index, ids in enumerate(inputs)
    ]


def _check_ids(name: str, ids: object, window_size: int, vocab_size: int) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        got = f"dtype {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name} must be an int64 tensor of token ids, got {got}")
    if ids.ndim not in (1, 2) or (ids.ndim == 2 and ids.shape[0] != 1):
        raise ShapeError(
            f"{name} must be [len] or [1, len], got {list(ids.shape)}; pass the rows of a batch "
            "one by one, without padding"
        )
    if ids.shape[-1] <= window_size:
        raise ValueError(
            f"{name} must be longer than window_size, {window_size} tokens, got {ids.shape[-1]}"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{name} must hold token ids in [0, {vocab_size - 1}], got ids from {low} to {high}"
        )
    return ids.reshape(1, -1)
