"""What propagation policies share: how they name layers, and how tokens fill a budget."""

import attrs
from torch import Tensor

from kvpolicy.checks import as_tuple, check_count
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import PropagationPolicy
from kvpolicy.selection import row_budgets, select_top


@attrs.frozen
class RankingPropagation(PropagationPolicy):
    """Base of policies that pass on a given number of tokens of each row: the highest ranked."""

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
        """Choose the tokens that go on to the next layer; see `PropagationPolicy.propagate`."""
        assert saliency is not None
        protected = self.protected(context)
        counts = self._counts(context, protected)
        if counts == context.new_valid.sum(dim=1).tolist():
            return None
        ranking = self.ranking(saliency, context)[:, None]
        valid, fixed = context.new_valid[:, None], protected[:, None]
        return select_top(ranking, counts, valid=valid, protected=fixed)[:, 0]

    def _counts(self, context: LayerContext, protected: Tensor) -> list[int]:
        """Return how many new tokens of each row go on; ``protected`` is ``[batch, new_len]``."""
        assert self.budget is not None
        valid, fixed = context.new_valid[:, None], protected[:, None]
        return row_budgets(self.budget, context.seen_len, valid=valid, protected=fixed)


def as_layers(layers: object) -> tuple[int, ...] | None:
    """Convert layer indices to an ascending tuple; None, for the default layers, stays None."""
    if layers is None:
        return None
    given = as_tuple("tsp_layers", "layer indices", layers)
    found = sorted(check_count("tsp_layers", layer) for layer in given)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"tsp_layers must be at least one layer, each once, got {found}")
    return tuple(found)


def within(
    name: str, layers: int | tuple[int, ...], num_layers: int, *, first: int = 0
) -> frozenset[int]:
    """Return layer indices as a set; ValueError, naming the argument, if one is outside the model.

    The smallest index that is allowed, ``first``, is told in the message.
    """
    found = (layers,) if isinstance(layers, int) else layers
    if max(found) >= num_layers:
        got = layers if isinstance(layers, int) else list(layers)
        raise ValueError(
            f"{name} must be in [{first}, {num_layers - 1}] for a model of {num_layers} layers, "
            f"got {got}"
        )
    return frozenset(found)
