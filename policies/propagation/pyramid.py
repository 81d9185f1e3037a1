"""Drops some of the older tokens after every layer."""

import math

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count, check_rate
from kvpolicy.context import LayerContext
from kvpolicy.policies.propagation.shared import RankingPropagation
from kvpolicy.policies.scorers.weighted_tail import tail_lens


@attrs.frozen
class PyramidPropagation(RankingPropagation):
    """Drops a fraction of the older tokens after every layer; the newest tokens all go on.

    The tail, the last ``1 + int(N * recent_rate)`` tokens, and the first ``protect`` tokens
    always go on. Of the ``c`` tokens before the tail, ``int(c * r)`` go on, with
    ``r = (1 - decay_ratio) * (cos(pi * l / num_layers) + 1) / 2 + decay_ratio`` after layer ``l``,
    those with the highest saliency averaged over all heads. Nothing is dropped where that would
    leave no more than ``min_context`` of them, or than the prompt has before its tail.

    Args:
        recent_rate: Fraction of the row's context that makes the tail, in (0, 1].
        decay_ratio: The value that ``r`` falls to at the last layer, in (0, 1].
        protect: First tokens that always go on, at least 0.
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

    paper = "arXiv 2405.12532"

    recent_rate: float = attrs.field(default=0.2, kw_only=True)
    decay_ratio: float = attrs.field(default=0.7, kw_only=True)
    protect: int = attrs.field(default=4, kw_only=True)
    min_context: int = attrs.field(default=64, kw_only=True)
    window_size: int = attrs.field(default=1, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_rate("recent_rate", self.recent_rate)
        check_rate("decay_ratio", self.decay_ratio)
        check_count("protect", self.protect)
        check_count("min_context", self.min_context)
        check_count("window_size", self.window_size, minimum=1)

    @property
    def protected_tail(self) -> int:
        """The least number of last tokens that always go on; long prompts protect more of them."""
        return self.window_size

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        """Return all layers but the last: those after which tokens are dropped."""
        return frozenset(range(num_layers - 1))

    def rate_after(self, layer_idx: int, num_layers: int) -> float:
        """Return the fraction of the older tokens that go on after a layer."""
        fall = (math.cos(math.pi * layer_idx / num_layers) + 1) / 2
        return (1 - self.decay_ratio) * fall + self.decay_ratio

    def layer_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return the fraction of a long prompt's tokens that reach each layer."""
        rates, before_tail = [], 1 - self.recent_rate
        for layer_idx in range(num_layers):
            rates.append(self.recent_rate + before_tail)
            before_tail *= self.rate_after(layer_idx, num_layers)
        return rates

    def protected(self, context: LayerContext) -> Tensor:
        """Mark the tokens that always go on: the newest, the window and the sinks."""
        lens = torch.tensor(tail_lens(context, self.recent_rate), device=context.keys.device)
        slots = torch.arange(context.new_len, device=context.keys.device)
        tail = slots >= context.new_len - lens[:, None]
        positions = context.positions[:, 0, context.key_len - context.new_len :]
        always = tail | (positions < self.protect)
        return (context.new_valid & always) | context.is_new_tail(self.window_size)

    def _counts(self, context: LayerContext, protected: Tensor) -> list[int]:
        lens = torch.stack([context.new_valid.sum(dim=1), protected.sum(dim=1)])
        new_lens, fixed_lens = lens.tolist()
        return [
            max(self._passed(context, row, new, tail), fixed)
            for row, (new, tail, fixed) in enumerate(
                zip(new_lens, tail_lens(context, self.recent_rate), fixed_lens, strict=True)
            )
        ]

    def _passed(self, context: LayerContext, row: int, new_len: int, tail_len: int) -> int:
        seen = context.seen_len[row]
        rate = self.rate_after(context.layer_idx, context.num_layers)
        stay = int((new_len - tail_len) * rate)
        if rate >= 1 or stay <= min(self.min_context, seen - 1 - int(seen * self.recent_rate)):
            return new_len
        return tail_len + stay
