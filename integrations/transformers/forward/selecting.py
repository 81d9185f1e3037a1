"""Let the policy act on a prompt: layers select keys, and pass tokens on.

If a selector decides for all layers together, or if the policy reads its prompt twice, layers hold
the whole prompt until every layer is scored. The keys and values to choose among are held apart
from the layer, with an outline of its context but without queries. Once the decoder's output is
known, `choose` stores what each layer keeps. Where a sliding window bounds a row of a layer, there
is nothing to choose. A layer behind a drop has fewer tokens, and so gets a smaller part of the
budget, which is the sum of what every head would keep by itself.
"""

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.decision import DeferredLayer
from kvpolicy.declarations import declares
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.chunks import AtEnd, Chunks
from kvpolicy.integrations.transformers.forward.closing_gaps import closed_up, without_gaps
from kvpolicy.integrations.transformers.forward.decoding import WindowSurvivors, carried_for
from kvpolicy.integrations.transformers.forward.layer_contexts import History
from kvpolicy.integrations.transformers.forward.passes import KeyUse, PassState, Stored
from kvpolicy.integrations.transformers.model.masks import FLASH
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layers import follow
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.layer_inputs import DecodingInputs
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import gather_positions, gather_slots


@attrs.frozen(eq=False)
class DeferredKV:
    """The keys and values of a layer that will choose once all layers have been scored.

    Args:
        undecided: The layer in the form that the policy decides on later.
        near: If the policy chooses only in some rows, what a sliding window leaves of the other
            rows; None if it chooses in all rows.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    undecided: DeferredLayer
    carried: Tensor | None = None
    near: WindowSurvivors | None = None


# Keys, values and positions of one layer, from which it chooses; see `PolicyLayer.store`.
_Held = tuple[Tensor, Tensor, Tensor]


class Select(AtEnd):
    """Let the policy choose what each layer keeps and which tokens it passes on.

    Attributes:
        waiting: The layers that choose when all layers were scored, by index.
    """

    keys = KeyUse.SELECT

    def __init__(self, chunks: Chunks | None = None, history: History | None = None) -> None:
        super().__init__(chunks, history)
        self.waiting: dict[int, DeferredKV] = {}
        # The slots that the last layer has kept, and their number in each row; see `Decision`.
        self._kept: tuple[Tensor, tuple[int, ...] | None] | None = None

    def begin(self, at: PassState) -> None:
        """See `AtQueries.begin`."""
        super().begin(at)
        policy = at.policy
        asks = policy.decoding is not None or policy.gapless or policy.decides_later
        self._never_asks = not asks and declares(policy.selector, "keeps_all")
        self._is_tested = policy._is_tested(policy.selector)

    def left_alone(self, at: PassState) -> frozenset[int]:
        """See `AtQueries.left_alone`."""
        model, last = at.call.model, len(at.layers) - 1
        drops = () if model.restarts else model.acting
        if at.call.implementation in FLASH:  # whose arguments change; see `LayerAttention.attend`
            return frozenset()
        return frozenset(
            index
            for index in range(1, min(drops, default=last))
            if index in at.masks.apart and at.masks.windows[index] is None
        )

    def observe(self, at: PassState, index: int, inputs: AttentionInputs, stored: Stored) -> None:
        """Let the policy choose what the layer keeps and which tokens it passes on."""
        layer, window = at.layers[index], at.masks.windows[index]
        layer.facts.query_heads = inputs.queries.shape[1]
        if window is None and self._keeps_all(at, index, inputs, stored):
            positions = at.masks.positions(layer, stored[0].shape[1], stored[0].device)
            layer.facts.expands = False
            counts = (stored[0].shape[2],) * stored[0].shape[0]
            layer.store(*stored, positions, None, counts=counts)
            return
        context = self.context(at, index, inputs, stored)
        if at.policy.decoding is not None:
            context = self._with_carried(at, layer, context)
        layer.facts.expands = context._stored is not None
        # Of one head if all heads keep the same tokens.
        positions = context.positions if context._stored is None else context.positions[:, :1]
        held = *stored, positions
        if at.policy.rereading is not None and at.call.model.windows[index] is not None:
            window = at.call.model.windows[index]  # a second reading is beyond what it sees
        try:
            if window is None:
                self._choose(at, layer, held, context)
            else:
                self._keep_window(at, layer, held, context, window)
        except Exception:
            self.checks.look()  # an error before this one may be its cause
            raise

    def _keeps_all(
        self, at: PassState, index: int, inputs: AttentionInputs, stored: Stored
    ) -> bool:
        """True if a layer without padding keeps and passes on all tokens, so no part is asked."""
        if not self._never_asks or index in self.history.layers:
            return False
        layer, model = at.layers[index], at.call.model
        plain = layer.plain and inputs.keys.shape[1] == stored[0].shape[1]
        if not plain or (index in model.acting and not model.restarts):
            return False
        lengths = at.reach.seen_by(layer)
        return lengths is not None and min(lengths) == stored[0].shape[2]

    def _keep_window(
        self, at: PassState, layer: PolicyLayer, held: _Held, context: LayerContext, window: int
    ) -> None:
        """Keep what a layer's sliding window sees; let the policy choose in shorter rows."""
        near = WindowSurvivors.of(
            held[2],
            at.tokens.lengths,
            window,
            at.call.implementation,
            seen_len=at.seen_len,
            held_len=context._held_len,
        )
        if not near.leaves_short_rows or at.policy.rereading is not None:
            whole = None if near.counts is None else near.counts == context._held_len
            layer.store(*held, near.kept(None), counts=near.counts, whole=whole)
            return
        saliency = self.saliency(at, context)
        decision = at.policy.decide(context, checks=self.checks, saliency=saliency)
        if decision.undecided is not None:
            undecided = decision.undecided.among(near.short)
            self.waiting[context.layer_idx] = DeferredKV(*held, undecided, decision.state, near)
            return
        self.checks.look()
        layer.store(*held, near.kept(decision.kept), decision.state)

    def _choose(
        self, at: PassState, layer: PolicyLayer, held: _Held, context: LayerContext
    ) -> None:
        """Keep what the policy selects from all keys of a layer.

        If all tokens are passed on, the parts' answers are checked after all layers have run, since
        checking waits for the device.
        """
        index = context.layer_idx
        remembered = index in self.history.layers
        saliency = self.saliency(at, context)
        decision = at.policy.decide(
            context, remembered=remembered, checks=self.checks, saliency=saliency
        )
        if decision.passed_on is not None:  # before other layers run on a wrong choice
            self.checks.look()
        if remembered:
            assert decision.saliency is not None
            self.history = self.history.noted(decision.saliency, context)
        self.passed = passed_slots(decision.passed_on, context, at)
        if decision.undecided is not None:
            waiting = DeferredKV(*held, decision.undecided, decision.state)
            self.waiting[index] = waiting
            return
        # A layer that uses the slots of another layer's indexer must hold the same tokens in them.
        borrows = layer.indexed is not None and layer.indexed.borrows
        if not borrows or self._kept is None:
            assert decision.kept is not None
            kept = decision.kept
            if not self._is_tested:
                # What the parts return is checked only later, and may be out of range.
                said = decision.counts
                full = said is not None and min(said) == kept.shape[2]
                kept = kept.clamp(min=0 if full else -1, max=held[0].shape[2] - 1)
            self._kept = kept, decision.counts
        kept, counts = self._kept
        if at.policy.gapless:
            self._store_closed_up(at, layer, held, index, kept, counts)
        else:
            whole = None if counts is None else counts == context._held_len
            layer.store(*held, kept, decision.state, counts=counts, whole=whole)

    def saliency(self, at: PassState, context: LayerContext) -> Tensor | None:
        """Return the saliency of a layer's keys if it is known; None to ask the scorer."""
        return self.summed(at, context) if context.layer_idx in self.carried else None

    @staticmethod
    def _store_closed_up(
        at: PassState,
        layer: PolicyLayer,
        held: _Held,
        index: int,
        kept: Tensor,
        counts: tuple[int, ...] | None,
    ) -> None:
        """Store kept keys, rotated to positions without gaps; see `PolicyLayer.store`."""
        if layer.facts.expands:
            raise UnsupportedModelError(
                f"layer {index} must store the keys that it attends to if "
                f"{at.policy} rotates them to positions without gaps, but computes them from what "
                "it stores; use gapless=False"
            )
        assert layer.facts.turns is not None
        (keys, values, positions), slots = held, torch.arange(kept.shape[2], device=kept.device)
        layer.store(
            closed_up(keys, positions, kept, layer.facts.turns),
            gather_slots(values, kept),
            gather_positions(positions, kept),
            torch.where(kept >= 0, slots, -1),
            counts=counts,
            whole=None if counts is None else True,
        )

    @staticmethod
    def _with_carried(at: PassState, layer: PolicyLayer, context: LayerContext) -> LayerContext:
        """Return the context with the scorer's state, updated by the last answer's queries."""
        decoding, observed = at.policy.decoding, layer.observed
        if decoding is None or not decoding.state_size or layer.held is None:
            return context
        carried = carried_for(observed, context.keys, decoding.state_size)
        if at.masks.order is not None:
            carried = gather_slots(carried, at.masks.order)
        before = DecodingInputs(carried)
        if observed.count:
            queries, places = observed.shown(at.tokens)
            asked = DecodingInputs(carried, places)
            since = attrs.evolve(context, queries=queries, decoding=asked)
            before = DecodingInputs(decoding.update_state(since))
        return attrs.evolve(context, decoding=before)

    def _check_numbers(self, at: PassState) -> None:
        """Check the last output for NaN, since a tested scorer's saliency is not checked."""
        scorer, hidden = at.policy.scorer, at.last_hidden
        if hidden is None or scorer is None or not at.policy._is_tested(scorer):
            return
        self.checks.refuse(
            hidden.isnan(),
            lambda: (
                f"score of {scorer} must return numbers, but the output of the last layer is NaN; "
                "look for NaN in the model's parameters and inputs"
            ),
        )

    def finish(self, at: PassState) -> SeenTokens:
        """Check the results of the policy's parts, and finish the pass; see `AtQueries.finish`.

        Under a ``gapless`` policy later tokens are read directly behind the tokens held.
        """
        self._check_numbers(at)
        super().finish(at)
        if not at.policy.gapless:
            return at.tokens
        follow(at.layers, at.tokens)
        return without_gaps(at.policy, at.tokens, at.layers)


class ChooseTokens(AtEnd):
    """Choose the tokens that a restarted prefill reads again, and store no keys."""

    keys = KeyUse.DISCARD

    def __init__(self, layer: int, chunks: Chunks | None = None) -> None:
        super().__init__(chunks)
        self._layer = layer

    def observe(self, at: PassState, index: int, inputs: AttentionInputs, stored: Stored) -> None:
        """Choose tokens at the filter layer; score earlier layers if the choice needs it."""
        if index != self._layer and index not in self.history.layers:
            return
        context = self.context(at, index, inputs, stored)
        saliency = self.summed(at, context) if index in self.carried else None
        if index == self._layer:
            passed = at.policy.decide_restart(context, saliency)
            self.passed = None if passed is None else passed.to(at.reach.valid.device)
            return
        saliency = at.policy.score(context) if saliency is None else saliency
        self.history = self.history.noted(saliency, context)


def passed_slots(passed_on: Tensor | None, context: LayerContext, at: PassState) -> Tensor | None:
    """Return the indices of the tokens that a layer passes on; None if it passes on all."""
    if passed_on is None:
        return None
    passed = passed_on.to(at.reach.valid.device)
    return None if torch.equal(passed >= 0, context.new_valid.to(passed.device)) else passed


def choose(
    policy: CachePolicy, layers: list[PolicyLayer], waiting: Mapping[int, DeferredKV]
) -> None:
    """Let all deferred layers choose the tokens to keep, and store these."""
    order = sorted(waiting)
    found = policy.decide_layers([waiting[index].undecided for index in order])
    for index, chosen in zip(order, found, strict=True):
        each = waiting[index]
        kept = chosen if each.near is None else each.near.kept(chosen)
        layers[index].store(each.keys, each.values, each.positions, kept, each.carried)
