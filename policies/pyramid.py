"""PyramidInfer: a little less of the context after every layer."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import causal_attention_sums
from kvpolicy.checks import check_count, check_rate
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import PropagationPolicy, Scorer
from kvpolicy.policies.selectors import KeepAllSelector
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import select_top


def tail_lens(context: LayerContext, recent_rate: float) -> list[int]:
    """For each row, the tokens of its tail: ``1 + int(seen_len * recent_rate)``, if there are."""
    new_lens = context.new_valid.sum(dim=1).tolist()
    return [
        min(1 + int(seen * recent_rate), new)
        for seen, new in zip(context.seen_len, new_lens, strict=True)
    ]


@attrs.frozen
class WeightedTailScorer(Scorer):
    """Attention that the tail of the prompt gives each token, later queries weighing more.

    ``saliency[h, j] = mean over tail queries i of w_i * softmax(q_i . k_j * scaling)`` per query
    head ``h``, in float32, causal, ``w = linspace(1, distance_weight)`` over the tail, the last
    ``1 + int(N * recent_rate)`` of the row's tokens.

    Args:
        recent_rate: Fraction of the row's context that makes the tail, in (0, 1].
        distance_weight: Weight of the last query against the first of the tail, above 0.

    Raises:
        TypeError: An argument is not a number.
        ValueError: An argument is out of its range.

    Example:
        >>> WeightedTailScorer().num_queries is None
        True

    Source: PyramidInfer (arXiv 2405.12532).
    """

    paper: ClassVar[str] = "arXiv 2405.12532"

    recent_rate: float = 0.2
    distance_weight: float = 1.2

    def __attrs_post_init__(self) -> None:
        check_rate("recent_rate", self.recent_rate)
        if isinstance(self.distance_weight, bool) or not isinstance(
            self.distance_weight, (int, float)
        ):
            raise TypeError(f"distance_weight must be a number, got {self.distance_weight!r}")
        if not 0 < self.distance_weight < math.inf:
            raise ValueError(
                f"distance_weight must be above 0 and finite, got {self.distance_weight}"
            )

    @property
    def num_queries(self) -> None:
        """All: how many make the tail depends on the prompt."""
        return

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, query_heads, key_len]``; see `Scorer.score`."""
        lens = tail_lens(context, self.recent_rate)
        longest = min(max(lens), context.query_len)
        tail = attrs.evolve(context, queries=context.queries[:, :, context.query_len - longest :])
        weights = torch.zeros(context.batch, longest, device=context.keys.device)
        for row, length in enumerate(lens):
            shown = min(length, longest)
            steps = torch.linspace(1.0, self.distance_weight, length, device=weights.device)
            weights[row, longest - shown :] = steps[length - shown :] / length
        return causal_attention_sums(tail, weights)


@attrs.frozen
class PyramidPropagation(PropagationPolicy):
    """After every layer but the last, a fraction of the context before the tail goes on.

    The tail, the last ``1 + int(N * recent_rate)`` tokens, and the first ``num_sinks`` tokens
    always go on. Of the ``c`` tokens before the tail, ``int(c * r)`` do, with
    ``r = (1 - decay_ratio) * (cos(pi * l / num_layers) + 1) / 2 + decay_ratio`` after layer ``l``,
    those with the highest saliency averaged over all heads. Nothing is dropped where that would
    leave no more than ``min_context`` of them, or than the prompt has before its tail.

    Args:
        recent_rate: Fraction of the row's context that makes the tail, in (0, 1].
        decay_ratio: What ``r`` falls to at the last layer, in (0, 1].
        num_sinks: First tokens that always go on, at least 0.
        min_context: Tokens before the tail below which nothing is dropped, at least 0.
        window_size: Last tokens that always go on even where the tail is shorter, at least 1; for
            scorers that leave a window unscored.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range.

    Example:
        >>> rates = PyramidPropagation(decay_ratio=0.7).layer_rates(num_layers=32)
        >>> round(sum(rates) / 32, 2)
        0.6

    Source: PyramidInfer (arXiv 2405.12532), with the settings of FastKV's comparison.
    """

    paper: ClassVar[str] = "arXiv 2405.12532"

    recent_rate: float = 0.2
    decay_ratio: float = 0.7
    num_sinks: int = 4
    min_context: int = 64
    window_size: int = attrs.field(default=1, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_rate("recent_rate", self.recent_rate)
        check_rate("decay_ratio", self.decay_ratio)
        check_count("num_sinks", self.num_sinks)
        check_count("min_context", self.min_context)
        check_count("window_size", self.window_size, minimum=1)

    @property
    def protected_tail(self) -> int:
        """The window; the tail's length depends on the prompt."""
        return self.window_size

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        """All but the last, after which nothing is computed."""
        return frozenset(range(num_layers - 1))

    def rate_after(self, layer_idx: int, num_layers: int) -> float:
        """Fraction ``r`` of the tokens before the tail that go on after a layer."""
        fall = (math.cos(math.pi * layer_idx / num_layers) + 1) / 2
        return (1 - self.decay_ratio) * fall + self.decay_ratio

    def layer_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """What reaches each layer of a long prompt; see `PropagationPolicy.layer_rates`."""
        rates, before_tail = [], 1 - self.recent_rate
        for layer_idx in range(num_layers):
            rates.append(self.recent_rate + before_tail)
            before_tail *= self.rate_after(layer_idx, num_layers)
        return rates

    def protected(self, context: LayerContext) -> Tensor:
        """The tail, the window and the sinks; see `PropagationPolicy.protected`."""
        lens = torch.tensor(tail_lens(context, self.recent_rate), device=context.keys.device)
        slots = torch.arange(context.new_len, device=context.keys.device)
        tail = slots >= context.new_len - lens[:, None]
        positions = context.positions[:, 0, context.key_len - context.new_len :]
        always = tail | (positions < self.num_sinks)
        return (context.new_valid & always) | context.is_new_tail(self.window_size)

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
        """Return int64 ``[batch, passed_len]`` or None; see `PropagationPolicy.propagate`."""
        assert saliency is not None
        valid, protected = context.new_valid[:, None], self.protected(context)[:, None]
        new_lens = context.new_valid.sum(dim=1).tolist()
        fixed_lens = protected[:, 0].sum(dim=1).tolist()
        budgets = [
            max(self._passed(context, row, new, tail), fixed)
            for row, (new, tail, fixed) in enumerate(
                zip(new_lens, tail_lens(context, self.recent_rate), fixed_lens, strict=True)
            )
        ]
        if budgets == new_lens:
            return None
        new = context.heads.mean(saliency[..., context.key_len - context.new_len :])
        return select_top(new[:, None], budgets, valid=valid, protected=protected)[:, 0]

    def _passed(self, context: LayerContext, row: int, new_len: int, tail_len: int) -> int:
        seen = context.seen_len[row]
        rate = self.rate_after(context.layer_idx, context.num_layers)
        stay = int((new_len - tail_len) * rate)
        if rate >= 1 or stay <= min(self.min_context, seen - 1 - int(seen * self.recent_rate)):
            return new_len
        return tail_len + stay


class PyramidInfer(CachePolicy):
    """Drops a little of the context after every layer; layers keep all that reaches them.

    Args:
        recent_rate: Fraction of the context that makes the tail: it observes, and always stays.
        decay_ratio: How much of the context before the tail goes on after the last layers; after
            the first nearly all does.
        distance_weight: Weight of the last observing query against the first.
        num_sinks: First tokens that always stay.
        min_context: Tokens before the tail below which nothing is dropped.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range.

    Example:
        >>> round(PyramidInfer(decay_ratio=0.75).prefill_compute_rate(num_layers=36), 2)
        0.6

    Source: PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference
    (arXiv 2405.12532), with the settings of FastKV's comparison.
    """

    paper: ClassVar[str] = "arXiv 2405.12532"

    def __init__(
        self,
        recent_rate: float = 0.2,
        decay_ratio: float = 0.7,
        distance_weight: float = 1.2,
        num_sinks: int = 4,
        min_context: int = 64,
    ) -> None:
        super().__init__(
            WeightedTailScorer(recent_rate, distance_weight),
            KeepAllSelector(),
            PyramidPropagation(recent_rate, decay_ratio, num_sinks, min_context),
        )
