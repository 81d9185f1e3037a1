"""What a policy chooses at one layer, at once or after all layers have been scored."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.interfaces import KVSelector, Part, Scorer
from kvpolicy.part_calls import DeferredChecks, as_stored, check_indices, kept_by
from kvpolicy.repetition import Repetition


@attrs.frozen(eq=False)
class DeferredLayer:
    """A layer with its saliency, waiting until a selector chooses tokens for all layers at once.

    Args:
        context: The layer, see `LayerContext._outlined`; with a saliency, as a selector sees it.
        saliency: float32 ``[batch, heads, key_len]``; None if there is none, or not yet.
    """

    context: LayerContext
    saliency: Tensor | None = None

    @staticmethod
    def of(context: LayerContext, saliency: Tensor | None) -> DeferredLayer:
        """Make the record of a layer that was scored, without its keys, values and queries."""
        if saliency is None:
            return DeferredLayer(context._outlined())
        saliency, context = as_stored(saliency, context._outlined())
        return DeferredLayer(context, saliency)

    def with_saliency(self, saliency: Tensor) -> DeferredLayer:
        """Return a copy of the record with a new saliency ``[batch, heads, key_len]``."""
        return DeferredLayer.of(self.context, saliency)

    def among(self, rows: Tensor) -> DeferredLayer:
        """Return a copy in which batch rows that ``rows`` does not mark hold only padding."""
        positions = self.context.positions.masked_fill(~rows, -1)
        context = attrs.evolve(self.context, positions=positions, held_len=None)
        return attrs.evolve(self, context=context)


@attrs.frozen(eq=False)
class Decision:
    """A policy's decision at one layer: which tokens it keeps, and which go on to the next layer.

    Args:
        kept: ``[batch, kv_heads, kept_len]``; of one head if all heads share the stored keys.
            None if the policy `decides_later`.
        passed_on: ``[batch, passed_len]``; None for all.
        state: The state that the scorer of the policy's `DecodingEviction` keeps for each key, kept
            or not; None if it keeps no state. See `Scorer.update`.
        undecided: The layer to pass to `CachePolicy.decide_layers`, if there is no ``kept`` yet.
        saliency: The saliency of the keys, for later layers that read it; None if the scorer was
            not called.
        counts: For each row, how many tokens each head keeps, if this is known without reading
            ``kept``; see `KVSelector.kept_counts`.
    """

    kept: Tensor | None
    passed_on: Tensor | None
    state: Tensor | None = None
    saliency: Tensor | None = None
    undecided: DeferredLayer | None = None
    counts: tuple[int, ...] | None = None


def kept_of_all(
    selector: KVSelector, layers: Sequence[DeferredLayer], checks: DeferredChecks
) -> list[Tensor]:
    """Return the tokens that each layer keeps, chosen by a selector after all layers are scored.

    They are ``[batch, kv_heads, kept_len]``, of one head if all heads share a choice.
    """
    if not selector.decides_together:
        return [kept_by(selector, each.saliency, each.context, checks)[0] for each in layers]
    contexts = [each.context._for_selector() for each in layers]
    saliencies = [each.saliency for each in layers]
    found = selector.select_together(saliencies, contexts)  # type: ignore[arg-type]
    if not isinstance(found, list) or len(found) != len(layers):
        raise TypeError(
            f"select_together of {selector} must return a list of {len(layers)} tensors, one for "
            f"each layer, got {found!r}"
        )
    return [
        check_indices(selector, kept, (each.batch, each.kv_heads), each.key_len, checks)
        for kept, each in zip(found, contexts, strict=True)
    ]


def check_later(scorer: Scorer | None, selector: KVSelector, rereading: Repetition | None) -> None:
    """Check that a policy's parts allow choosing tokens only after all layers are scored.

    Inputs that only a layer has while it is read are gone by then.
    """
    if selector.decides_together or rereading is not None:
        _check_asks(selector, f"that chooses after all layers were read: {selector}")
    if rereading is None:
        return
    if scorer is None or not selector.needs_saliency or scorer.num_queries == 0:
        raise ValueError(
            "rereading must be None if no queries are scored, since a second reading provides "
            f"only queries, got {rereading} with the scorer {scorer} and {selector}"
        )
    _check_asks(scorer, f"that scores a second reading, {rereading}: {scorer}")


def _check_asks(part: Part, what: str) -> None:
    asks = ("history_layers", "needs_rotary", "needs_output_weight")
    named = [name for name in asks if getattr(part, name)]
    if named:
        raise ValueError(f"{', '.join(named)} must not be declared by a part {what}")
