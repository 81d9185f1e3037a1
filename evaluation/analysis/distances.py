"""Measure how far the output moves if tokens are dropped at a layer, and choose a layer by it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count
from kvpolicy.evaluation.analysis.attention import top_tokens
from kvpolicy.evaluation.analysis.prefill import (
    check_prompts,
    final_state,
    layer_saliencies,
    showing,
    states_after_drops,
)
from kvpolicy.evaluation.defaults import CRITERIA, TOLERANCE
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.policies import LastQueryProductScorer as LastQuery
from kvpolicy.policies import TokenSelectivePropagation, WindowMaxPoolScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LayerDistance(NamedTuple):
    """What a drop after ``tsp_layer`` costs and saves.

    ``compute_rate``: layer-tokens of the prefill, over a full prefill's. ``squared``:
    ``|h_full - h|^2``, the mean over the prompts. ``normalised``: the mean of ``|h_full - h|^2 /
    |h_full|^2``, 0.01 for a tenth of the state's length; ``worst``: of the farthest prompt.
    """

    tsp_layer: int
    compute_rate: float
    squared: float
    normalised: float
    worst: float


@attrs.frozen
class OutputDistances:
    """How far the output moves from full context's if tokens are dropped at each layer.

    A distance is ``|h_full - h| / |h_full|``, where ``h`` is the last token's hidden state after
    the final norm.

    Args:
        tsp_rate: Fraction of a prompt that goes on.
        num_layers: Layers of the model.
        layers: The layers at which tokens are dropped, ascending.
        lengths: Tokens of each prompt.
        norms: ``|h_full|`` of each prompt.
        propagated: ``propagated[i][p]``: for token-selective propagation after layer
            ``layers[i]`` and prompt ``p``.
        restarted: The same for a restart on as many tokens chosen there; empty if not measured.
    """

    tsp_rate: float
    num_layers: int
    layers: tuple[int, ...]
    lengths: tuple[int, ...]
    norms: tuple[float, ...]
    propagated: tuple[tuple[float, ...], ...]
    restarted: tuple[tuple[float, ...], ...] = ()

    @property
    def by_layer(self) -> list[LayerDistance]:
        """What a drop after each layer costs and saves."""
        rows = []
        for layer, far in zip(self.layers, self.propagated, strict=True):
            later = self.num_layers - layer - 1
            rate = (layer + 1 + self.tsp_rate * later) / self.num_layers
            parts = [each**2 for each in far]
            squared = fmean(part * n**2 for part, n in zip(parts, self.norms, strict=True))
            rows.append(LayerDistance(layer, rate, squared, fmean(parts), max(parts)))
        return rows

    def choose(self, criterion: str = "argmin", tolerance: float = TOLERANCE) -> int:
        """Choose the layer after which FastKV drops tokens, among those measured.

        Args:
            criterion: ``"argmin"``, the paper's equation: the smallest ``squared``, the earliest
                of equals. Distances tend to fall towards later layers, so that the last candidate
                often decides. ``"earliest"``, the paper's text: the first layer that is close.
            tolerance: The largest ``normalised`` that is close, above 0.

        Raises:
            ValueError: ``criterion`` is unknown, ``tolerance`` is not above 0 and finite, or no
                layer is within it; then names the closest.

        Example:
            >>> far = ((0.7,), (0.09,), (0.05,))
            >>> distances = OutputDistances(0.2, 6, (0, 1, 2), (1024,), (10.0,), far)
            >>> distances.choose("argmin"), distances.choose("earliest")
            (2, 1)
        """
        check_criterion(criterion, tolerance)
        if criterion == "argmin":
            return min(self.by_layer, key=lambda each: each.squared).tsp_layer
        for each in self.by_layer:
            if each.normalised <= tolerance:
                return each.tsp_layer
        closest = min(self.by_layer, key=lambda each: each.normalised)
        raise ValueError(
            f"tolerance must be reached by a TSP layer up to max_layer {self.layers[-1]}, but the "
            f"closest, {closest.tsp_layer}, is at {closest.normalised:.3g}, got {tolerance:g}; "
            "raise tolerance or max_layer, or choose by criterion 'argmin'"
        )


def output_distances(
    model: PreTrainedModel,
    inputs: Sequence[Sequence[int] | Tensor],
    tsp_rate: float = 0.2,
    *,
    max_layer: int | None = None,
    window_size: int = 8,
    kernel_size: int = 7,
    protect: int = 0,
    restart: bool = True,
    progress: Progress = silent,
) -> OutputDistances:
    """Measure how far the model's output moves if tokens are dropped at each layer.

    *Propagation*: after the layer only the tokens chosen there go on, as in FastKV (saliency of
    the window, max-pooled, averaged over all query heads; the window always goes on). *Restart*: as
    many tokens, chosen there as in GemFilter (raw products of the last query with all keys, summed
    over query heads, average-pooled with kernel 5; the last token always among them), are read
    again from the start, at positions without gaps. Nothing is evicted in either way.

    A prompt costs one full prefill, and for every layer those after it, on the tokens that go on. A
    restart costs one more full prefill, and for every layer a prefill of the chosen tokens.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        inputs: Token ids of prompts, each ``[prompt_len]`` or ``[1, prompt_len]`` without padding.
        tsp_rate: Fraction of a prompt that goes on, in (0, 1].
        max_layer: The last layer to drop at; None for FastKV's default layer. Layers that see only
            a part of the context are left out.
        window_size: Tokens of the observation window, at least 1, fewer than any prompt's.
        kernel_size: Width of the max-pooling, odd.
        protect: First tokens that always go on, at least 0.
        restart: Whether restarts are measured too.
        progress: Told of every prompt.

    Raises:
        ValueError: An argument is out of its range, or the model returns no finite numbers.
        UnsupportedModelError: Tokens cannot be dropped in this model.

    Source: FastKV (arXiv 2502.01068), figure 3, and section 3 for the choice of a layer.
    """
    scorer = WindowMaxPoolScorer(window_size, kernel_size=kernel_size)
    drop = TokenSelectivePropagation(tsp_rate=tsp_rate, window_size=window_size, protect=protect)
    prompts = check_prompts(model, inputs, window_size)
    lengths = tuple(prompt.shape[1] for prompt in prompts)
    parts = ModelParts(model)
    if max_layer is None:
        placed = drop.placed(parts.num_layers, parts.eligible)
        (max_layer,) = placed.acting_layers(parts.num_layers)
    first, last = parts.eligible[0], parts.num_layers - 1
    if not first <= check_count("max_layer", max_layer) <= last:
        raise ValueError(
            f"max_layer must be in [{first}, {last}], from the first layer that sees the whole "
            f"context to the model's last, got {max_layer}"
        )
    at = tuple(layer for layer in parts.eligible if layer <= max_layer)
    # If no layer sees the whole context, the message says so, and what would be possible.
    parts.check_policy(
        showing(scorer, propagation=attrs.evolve(drop, tsp_layer=first)), max(lengths)
    )
    found: dict[int, list[float]] = {}
    # The longest first, so that it fails at once if it does not fit the model or the memory.
    for index in sorted(range(len(prompts)), key=lambda each: -lengths[each]):
        progress("output distances", len(found), len(prompts))
        full, states = states_after_drops(model, prompts[index], scorer, drop, at)
        if restart:
            length, always = lengths[index], min(window_size + protect, lengths[index])
            count = drop.budget.count(seen_len=length, available=length, protected=always)
            states += _after_restarts(model, prompts[index], at, count)
        norm = float(full.norm())
        far = [float((full - state).norm()) / (norm or math.nan) for state in states]
        if not math.isfinite(norm + math.fsum(far)):
            raise ValueError(
                "model must return finite final hidden states other than 0, but for prompt "
                f"{index} it does not; try another dtype"
            )
        found[index] = [norm, *far]
    progress("output distances", len(prompts), len(prompts))
    norms, *columns = zip(*(found[index] for index in range(len(prompts))), strict=True)
    moved, again = tuple(columns[: len(at)]), tuple(columns[len(at) :])
    return OutputDistances(float(tsp_rate), parts.num_layers, at, lengths, norms, moved, again)


def _after_restarts(
    model: PreTrainedModel, prompt: Tensor, layers: Sequence[int], count: int
) -> list[Tensor]:
    """Return the final state after a restart on the tokens chosen at each layer."""
    products = layer_saliencies(model, prompt, LastQuery(kernel_size=5))
    chosen = torch.stack([products[layer] for layer in layers])
    chosen[:, -1] = math.inf  # the last token is always chosen
    chosen = top_tokens(chosen, count).to(prompt.device)
    return [final_state(model, prompt[:, tokens]) for tokens in chosen]


def check_criterion(criterion: str, tolerance: float) -> None:
    """Check the name of a criterion for choosing the drop layer, and its tolerance."""
    if criterion not in CRITERIA:
        raise ValueError(f"criterion must be one of {', '.join(CRITERIA)}, got {criterion!r}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, numbers.Real):
        raise TypeError(f"tolerance must be a number above 0, got {tolerance!r}")
    if not 0 < float(tolerance) < math.inf:
        raise ValueError(f"tolerance must be above 0 and finite, got {tolerance}")
