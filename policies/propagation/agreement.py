"""Drops tokens once, after the first layer whose ranking agrees with the previous layer's."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.budgets import Budget, DefaultRate
from kvpolicy.checks import check_count, check_rate
from kvpolicy.context import LayerContext
from kvpolicy.host_counts import on_device
from kvpolicy.interfaces import PropagationPolicy, nearest_layer
from kvpolicy.policies.propagation.shared import as_layers, within
from kvpolicy.selection import compress, ranks, row_budgets

# Where layers are left open, the first and the last that may act.
DEPTHS = (0.25, 0.5)


@attrs.frozen
class AgreementPropagation(PropagationPolicy):
    """Drops tokens after the first layer that ranks tokens much as the layer before it does.

    At each layer that may act, and at the layer before it, a row's tokens are ranked by the mean of
    the saliency over all query heads. If at least a share ``agreement`` of the best tokens (without
    the protected ones) is the same at both layers, only the best go on; otherwise all tokens do. At
    the last layer that may act the best go on in any case. So each row drops tokens once, after a
    layer of its own.

    Args:
        tsp_rate: Fraction of the row's context that goes on, in (0, 1]. 0.2 by default.
        window_size: Trailing tokens that always go on, at least 1.
        tsp_tokens: Number of tokens that go on, in place of the rate.
        agreement: Share of the best tokens that must be the same at both layers, in [0, 1].
        tsp_layers: Indices of the layers that may act, from 1, since each needs a layer before it;
            None for the layers from a quarter to half of the model that see the whole context.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> sorted(AgreementPropagation().acting_layers(num_layers=16))
        [3, 4, 5, 6, 7]
    """

    decides_by_content = True  # the prompt's content decides after which layer tokens are dropped
    history_layers = 1  # that of the layer before

    tsp_rate: float | None = DefaultRate(0.2)
    window_size: int = attrs.field(default=8, kw_only=True)
    tsp_tokens: int | None = attrs.field(default=None, kw_only=True)
    agreement: float = attrs.field(default=0.7, kw_only=True)
    tsp_layers: tuple[int, ...] | None = attrs.field(
        default=None, kw_only=True, converter=as_layers
    )

    def __attrs_post_init__(self) -> None:
        # At least the last token: the next one is predicted from it.
        check_count("window_size", self.window_size, minimum=1)
        check_rate("agreement", self.agreement, zero=True)
        if self.tsp_layers is not None and min(self.tsp_layers) < 1:
            raise ValueError(
                "tsp_layers must be at least 1, since the layer before has a say, got "
                f"{list(self.tsp_layers)}"
            )
        # A default rate that gave way to a number of tokens shall not show in the repr.
        object.__setattr__(self, "tsp_rate", self._going_on.rate)

    @property
    def protected_tail(self) -> int:
        """The number of last tokens that score the others and always go on to later layers."""
        return self.window_size

    @property
    def _going_on(self) -> Budget:
        return Budget(self.tsp_rate, self.tsp_tokens, name="tsp")

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        """Return the layers after which tokens may be dropped; ValueError if outside the model."""
        if self.tsp_layers is None:
            first, last = (max(int(num_layers * depth) - 1, 1) for depth in DEPTHS)
            return frozenset(range(first, last + 1)) & frozenset(range(num_layers))
        return within("tsp_layers", self.tsp_layers, num_layers, first=1)

    def placed(self, num_layers: int, eligible: Sequence[int]) -> PropagationPolicy:
        """Return a copy with unset ``tsp_layers`` set to allowed layers near the default."""
        wanted = self.acting_layers(num_layers)
        if self.tsp_layers is not None or wanted <= set(eligible):
            return self
        after_first = [layer for layer in eligible if layer]
        if not after_first or not wanted:
            return self
        found = wanted & set(after_first) or {nearest_layer(max(wanted), after_first)}
        return attrs.evolve(self, tsp_layers=tuple(sorted(found)))

    def layer_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return the highest fraction of a prompt's tokens that may reach each layer."""
        rate = self._going_on.fraction(context_len, protected=self.window_size)
        last = max(self.acting_layers(num_layers), default=num_layers)
        return [1.0 if index <= last else rate for index in range(num_layers)]

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
        """Choose the tokens that go on to the next layer; see `PropagationPolicy.propagate`."""
        assert saliency is not None
        valid, protected = context.new_valid[:, None], self.protected(context)[:, None]
        budgets = row_budgets(self._going_on, context.seen_len, valid=valid, protected=protected)
        if budgets == context.new_valid.sum(dim=1).tolist():
            return None
        best = self._best(self.ranking(saliency, context), budgets, context)
        goes = best | ~self._acts(best, budgets, context)[:, None] & context.new_valid
        counts = torch.stack([goes.sum(dim=1), context.new_valid.sum(dim=1)]).tolist()
        return None if counts[0] == counts[1] else compress(goes, max(counts[0]))

    def _acts(self, best: Tensor, budgets: Sequence[int], context: LayerContext) -> Tensor:
        """Mark the batch rows that drop tokens after this layer: bool ``[batch]``."""
        last = context.layer_idx == max(self.acting_layers(context.num_layers))
        if last or not context.layer.history:
            return torch.full((context.batch,), last, device=best.device)
        before = context.layer.heads.mean(context.layer.history[-1])
        earlier = self._best(before, budgets, context)
        free = ~self.protected(context)
        same, chosen = (best & earlier & free).sum(dim=1), (best & free).sum(dim=1)
        return same >= self.agreement * chosen

    def _best(self, ranking: Tensor, budgets: Sequence[int], context: LayerContext) -> Tensor:
        """Mark the tokens of each batch row that go on if it drops any: ``[batch, new_len]``."""
        protected = self.protected(context)
        candidates = context.new_valid & ~protected
        free = on_device(budgets, ranking.device)[:, None] - protected.sum(dim=1, keepdim=True)
        return protected | (candidates & (ranks(ranking, candidates) < free))
