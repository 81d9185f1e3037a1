"""Measure how far the output changes when tokens are dropped at a layer (FastKV, figure 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from kvpolicy.evaluation.analysis.attention import top_tokens
from kvpolicy.evaluation.analysis.forward import final_state, layer_saliencies
from kvpolicy.evaluation.analysis.inputs import check_layers, check_prompts
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.policies import (
    KeepAllSelector,
    LastQueryProductScorer,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from kvpolicy.policy import CachePolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The published settings of the two methods.
_MAX_POOL = 7
_AVERAGE_POOL = 5


@attrs.frozen
class OutputDistances:
    """How far the output moves from full context's when tokens are dropped at each layer.

    A distance is ``||h_full - h|| / ||h_full||`` of the last token's final hidden states.

    Args:
        tsp_rate: Fraction of a prompt that goes on.
        layers: The layers at which tokens are dropped.
        tokens: For each prompt, the tokens that go on.
        propagated: ``propagated[p][i]``: for prompt ``p``, token-selective propagation after layer
            ``layers[i]``.
        restarted: The same for a restart on as many tokens chosen at that layer.
    """

    tsp_rate: float
    layers: tuple[int, ...]
    tokens: tuple[int, ...]
    propagated: tuple[tuple[float, ...], ...]
    restarted: tuple[tuple[float, ...], ...]

    @property
    def mean_propagated(self) -> tuple[float, ...]:
        """The mean output distance, by layer, when tokens are dropped after that layer."""
        return _means(self.propagated)

    @property
    def mean_restarted(self) -> tuple[float, ...]:
        """The mean output distance, by layer, when prefill restarts on the tokens chosen there."""
        return _means(self.restarted)

    def as_data(self) -> dict[str, Any]:
        """Return the distances and their settings as a dict for JSON."""
        ways = (
            ("propagation", self.mean_propagated, self.propagated),
            ("restart", self.mean_restarted, self.restarted),
        )
        return {
            "tsp_rate": self.tsp_rate,
            "layers": list(self.layers),
            "tokens": list(self.tokens),
            **{
                name: {"mean": list(mean), "prompts": [list(row) for row in rows]}
                for name, mean, rows in ways
            },
        }


def _means(rows: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    return tuple(sum(each) / len(each) for each in zip(*rows, strict=True))


def output_distances(
    model: PreTrainedModel,
    inputs: Sequence[Sequence[int] | Tensor],
    tsp_rate: float = 0.2,
    *,
    window_size: int = 8,
    layers: Sequence[int] | None = None,
    progress: Progress = silent,
) -> OutputDistances:
    """Measure how much the model's output changes when tokens are dropped at each layer.

    *Propagation*: after the layer only the tokens chosen there go on, as in FastKV (saliency of
    the window, max-pooled with kernel 7, averaged over all query heads; the window always goes on).
    *Restart*: as many tokens, chosen there as in GemFilter (raw products of the last query with all
    keys, summed over query heads, average-pooled with kernel 5; the last token always among them),
    are read again from the start, at positions without gaps. Nothing is evicted from the cache in
    either way, so that only the drop has an effect.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        inputs: Prompts, each ``[context_len]`` or ``[1, context_len]`` token ids, at least one.
        tsp_rate: Fraction of a prompt that goes on, in (0, 1].
        window_size: Tokens of the observation window, at most those of the shortest prompt.
        layers: Layers to drop at; None for all. Each costs up to one prefill of every prompt.
        progress: Told of every prompt and layer.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: There are no prompts, one is empty, outside the vocabulary or shorter than the
            window, or a rate or layer is out of its range; the model is in training mode, or
            returns no finite numbers.

    Source: FastKV (arXiv 2502.01068), figure 3.
    """
    prompts = check_prompts(model, inputs, window_size)
    chosen = check_layers(layers, model.config.num_hidden_layers)
    propagations = [
        TokenSelectivePropagation(tsp_layer=layer, tsp_rate=tsp_rate, window_size=window_size)
        for layer in chosen
    ]
    budget = propagations[0].budget
    tokens = [
        budget.count(seen_len=length, available=length, protected=window_size)
        for length in (prompt.shape[1] for prompt in prompts)
    ]
    done, total = 0, len(prompts) * len(chosen)
    propagated: list[tuple[float, ...]] = []
    restarted: list[tuple[float, ...]] = []
    for prompt, count in zip(prompts, tokens, strict=True):
        products, full = layer_saliencies(
            model, prompt, LastQueryProductScorer(kernel_size=_AVERAGE_POOL)
        )
        gone_on, read_again = [], []
        for propagation, product in zip(propagations, products[list(chosen)], strict=True):
            progress("output distances", done, total)
            gone_on.append(_distance(full, _after_propagation(model, prompt, propagation)))
            read_again.append(_distance(full, _after_restart(model, prompt, product, count)))
            done += 1
        propagated.append(tuple(gone_on))
        restarted.append(tuple(read_again))
    progress("output distances", total, total)
    return OutputDistances(
        float(tsp_rate), chosen, tuple(tokens), tuple(propagated), tuple(restarted)
    )


def _after_propagation(
    model: PreTrainedModel, prompt: Tensor, propagation: TokenSelectivePropagation
) -> Tensor:
    scorer = WindowMaxPoolScorer(propagation.window_size, kernel_size=_MAX_POOL)
    return final_state(model, prompt, CachePolicy(scorer, KeepAllSelector(), propagation))


def _after_restart(model: PreTrainedModel, prompt: Tensor, products: Tensor, count: int) -> Tensor:
    chosen = top_tokens(products, count, protected_tail=1).to(prompt.device)
    return final_state(model, prompt[:, chosen])


def _distance(full: Tensor, other: Tensor) -> float:
    distance = float((full - other).norm() / full.norm())
    if not math.isfinite(distance):
        raise ValueError(
            "model must return finite final hidden states other than 0, but it does not; try "
            "another dtype"
        )
    return distance
