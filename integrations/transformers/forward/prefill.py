"""Run a forward on which the policy acts: it selects keys, and tokens to pass on."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvpolicy.context import LayerContext
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.append import Forward
from kvpolicy.integrations.transformers.forward.blocks import Blocks, LowerRight
from kvpolicy.integrations.transformers.forward.closing_gaps import closed_up, without_gaps
from kvpolicy.integrations.transformers.forward.decoding.choosing import (
    WindowSurvivors,
    carried_for,
)
from kvpolicy.integrations.transformers.forward.deferred_layers import DeferredKV
from kvpolicy.integrations.transformers.forward.history import History
from kvpolicy.integrations.transformers.forward.indexers import new_places
from kvpolicy.integrations.transformers.forward.inputs import (
    take_columns,
)
from kvpolicy.integrations.transformers.forward.layer_arguments import cut_arguments
from kvpolicy.integrations.transformers.forward.narrowing import LARGEST_SHARE, LayerSeen, Narrowed
from kvpolicy.integrations.transformers.forward.row_lengths import RowLengths
from kvpolicy.integrations.transformers.model.masks import DENSE, Mask
from kvpolicy.integrations.transformers.model.routing import (
    Attend,
    AttentionInputs,
    without_queries,
)
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.part_calls import DeferredChecks
from kvpolicy.policy import Decision
from kvpolicy.selection import gather_positions, gather_slots


class ActingForward(Forward):
    """A forward over a prompt, or over the end of a prompt, on which the policy acts.

    A layer sees the tokens it holds and the new tokens that reach it. It chooses among them, and
    may pass on fewer new tokens. If it passes on few, it is run for these only; see `narrowing`.

    Args:
        args: See `Forward`.
        narrows: Whether a layer may be run for only some of the tokens that reach it.
        keep_last: Number of last tokens whose outputs are asked for; None for all tokens that reach
            the end.
        refills: Whether the last layer's output is padded to one hidden state for each token that
            the decoder has read. The padding, on the left, is cut off again from the decoder's
            output.
        features: Features to add to hidden states between layers, in place of the decoder.
        kwargs: See `Forward`.
    """

    acts = in_prompt = True

    def __init__(
        self,
        *args: Any,
        narrows: bool = False,
        keep_last: int | None = None,
        refills: bool = False,
        features: AddedFeatures | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._features = features
        self._refills = refills
        self._filled = 0  # number of hidden states that are padding
        self._seen_len = tuple(self.tokens.lengths.tolist())
        self._narrows = narrows
        # Moving padding before tokens leaves the last token last, but may move others. The last
        # columns that were asked for would then be confused with later tokens.
        moved = self._order_of_columns is not None
        self._keep_last = None if moved and keep_last != 1 else keep_last
        layers = enumerate(self.layers)
        choosing = [i for i, each in layers if each.attends and self._window(i) is None]
        self.history = History.of(self.policy, len(self.layers), choosing)
        self._row_lengths = RowLengths(self._before, self.new_valid, padded=self._padded)
        self._checks = DeferredChecks()  # on the answers of parts at earlier layers
        self._passed: Tensor | None = None  # slots that the current layer passes on
        # The slots that the last layer has kept, and their number in each row; see `Decision`.
        self._kept: tuple[Tensor, tuple[int, ...] | None] | None = None
        self.waiting: dict[int, DeferredKV] = {}  # by layer, if all choose at the end
        # For a layer that runs twice: whether this is the first run; then its keys and values; and,
        # if the second run is for some tokens only, for which.
        self._looking = False
        self._seen: tuple[Tensor, Tensor] | None = None
        self._narrowed: Narrowed | None = None
        self._blocks: Blocks | None = None  # how the current layer attends, if not under a mask
        self._lower_right = LowerRight()

    # Before a layer.

    def enter_layer(
        self, index: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the layer's arguments, for few tokens if it passes on few.

        See `Forward.enter_layer`.
        """
        hidden = self._with_features_before(index, hidden)
        if not self._few_go_on(index) or self._own_block(kwargs) is not None:
            return super().enter_layer(index, module, hidden, kwargs)
        self._find_asked(index, module, hidden, kwargs)
        self._combine(self.layers[index])
        valid = self._valid_slots(self.layers[index])
        here = self._reaching(kwargs)
        self._look(module, hidden, here)
        slots = self._going_on(index)
        assert self._seen is not None
        keys, values = self._seen
        new_len = hidden.shape[self._token_axis(hidden)]
        own = torch.where(slots < 0, -1, slots + keys.shape[2] - new_len).to(keys.device)
        valid = None if valid is None else valid.to(keys.device)
        self._narrowed = Narrowed(keys, values, own, valid, self.implementation)
        here = cut_arguments({**here, "attention_mask": None}, slots, new_len)
        self._note_places(here)
        return self._taken(hidden, slots), here

    def _few_go_on(self, index: int) -> bool:
        """True if a layer passes on so few tokens that running it twice is worth it."""
        # A layer with a state would read the tokens twice. A layer whose keys other layers use must
        # have keys of all tokens.
        layer = self.layers[index]
        plain = type(layer) is PolicyLayer and index not in self._lent
        narrows = self._narrows and plain and layer.shows_queries
        if not narrows or self._window(index) is not None:
            return False
        new_len, num_layers = self.new_valid.shape[1], len(self.layers)
        if index == num_layers - 1:
            return self._keep_last is not None and self._keep_last < new_len
        propagation = self.policy.propagation
        if propagation.restarts or index not in propagation.acting_layers(num_layers):
            return False
        if propagation.decides_by_content:  # the number is known only from queries and keys
            return True
        seen = max(self._seen_len)
        rate = propagation.layer_rates(num_layers, context_len=seen)[index + 1]
        return bool(rate * seen <= LARGEST_SHARE * new_len)

    def _valid_slots(self, layer: PolicyLayer) -> Tensor | None:
        """Return which slots are tokens; None without padding.

        It is ``[batch, 1 or kv_heads, key_len]`` bool.
        """
        if self._combined is None:
            return None
        differ = layer.ragged or self._moved is not None
        return (self._combined if differ else self._combined[:, :1]) >= 0

    def _mask(self, index: int, hidden: Tensor, own: Tensor | None = None) -> Mask:
        """Make the layer's mask; None if it attends in blocks, which make their own masks.

        See `Forward._mask`.
        """
        self._blocks = self._in_blocks(index, hidden.device) if own is None else None
        return super()._mask(index, hidden, own) if self._blocks is None else None

    def _in_blocks(self, index: int, device: torch.device) -> Blocks | None:
        layer, window = self.layers[index], self._window(index)
        plain = type(layer) is PolicyLayer and index not in self._lent and layer.shows_queries
        unseen = self._attended is None and self._spares_masks  # weights and masks are not read
        if not plain or not unseen or self.implementation not in DENSE:
            return None
        keys = None
        if self._combined is not None or window is not None:
            keys = self._positions(layer, layer.choices, device)
            if keys.shape[1] > 1 and bool((keys == keys[:, :1]).all()):
                keys = keys[:, :1]
        places = self.new_positions.to(device)
        return Blocks(self.implementation, self._lower_right, keys, places, window)

    def _look(self, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        """Run a layer until its queries and keys are known and the policy has decided."""
        self._note_places(kwargs)
        self._looking = True
        try:
            # `forward` is called directly, since this code runs inside a hook of the layer.
            # Attention is not computed.
            module.forward(hidden, **{**kwargs, "attention_mask": None})
        except LayerSeen:
            return
        finally:
            self._looking = False
        raise AssertionError("the layer called no attention function")

    def _going_on(self, index: int) -> Tensor:
        """Return the slots ``[batch, count]`` of the layer's tokens whose output is needed."""
        slots, self._passed = self._passed, None
        if slots is not None:
            self._pass_on(index, slots)
        else:
            everything = torch.arange(self.new_valid.shape[1], device=self.new_valid.device)
            slots = torch.where(self.new_valid, everything, -1)
        if index < len(self.layers) - 1 or self._keep_last is None:
            return slots
        return slots[:, max(slots.shape[1] - self._keep_last, 0) :]

    # Inside its attention.

    def update(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Join a layer's new keys and values to the held ones; return all for its attention."""
        if self._seen is not None:  # `Narrowed` holds all keys already
            self._pending = keys, values
            return self._pending
        layer = self.layers[index]
        self._updated.add(index)
        keys, values = layer.join(keys, values)
        if self._order is not None:
            keys, values = gather_slots(keys, self._order), gather_slots(values, self._order)
        self._pending = keys, values
        if isinstance(layer, IndexedLayer):
            layer.attend_to(keys)
        if not layer.shows_queries:
            self._decide(index, without_queries(layer.query_heads, keys, values))
        return keys, values

    def update_index(self, index: int, keys: Tensor) -> Tensor:
        """Join a layer's new index keys to the held ones; return all for its indexer."""
        layer = self.layers[index]
        assert isinstance(layer, IndexedLayer)
        return layer.show_index(keys, new_places(self.layers, self._slots), self._order)

    def before_attention(self, index: int, inputs: AttentionInputs) -> None:
        """Let the policy decide in the first of two runs, and end that run."""
        if self._looking:
            self._seen = inputs.keys, inputs.values
            self._decide(index, inputs)
            raise LayerSeen

    def attend(
        self, attend: Attend, module: nn.Module, query: Tensor, *others: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Call the module's attention function, in blocks if this avoids a large mask."""
        if self._narrowed is not None:
            return self._narrowed.attend(attend, module, query, **kwargs), None
        blocks, self._blocks = self._blocks, None
        if blocks is None:
            return super().attend(attend, module, query, *others, **kwargs)
        key, value, *_ = others
        if self._told is not None:  # it adds a bias that it made for all keys
            assert self._inside is not None
            mask = super()._mask(self._inside, query)
            return super().attend(attend, module, query, key, value, mask, **kwargs)
        return blocks.attend(attend, module, query, key, value, **kwargs), None

    def observe(self, index: int, inputs: AttentionInputs) -> None:
        """Let the policy decide after the layer has attended, if it has not decided before."""
        if self._seen is None:
            self._decide(index, inputs)
        self._pending = self._seen = self._narrowed = None

    def _decide(self, index: int, inputs: AttentionInputs) -> None:
        layer, window = self.layers[index], self._window(index)
        layer.query_heads, layer.scores = inputs.queries.shape[1], inputs.scores
        context = self._with_carried(layer, self._context(index, inputs))
        layer.expands = context.stored is not None
        assert self._pending is not None
        keys, values = self._pending
        self._pending = None
        # Of one head if all heads keep the same tokens.
        positions = context.positions if context.stored is None else context.positions[:, :1]
        if self.policy.rereading is not None and self._windows[index] is not None:
            window = self._windows[index]  # a second reading is beyond what it sees
        if window is not None:
            near = WindowSurvivors.of(
                positions,
                self.tokens.lengths,
                window,
                self.implementation,
                seen_len=self._seen_len,
                held_len=context.held_len,
            )
            asked = near.leaves_short_rows and self.policy.rereading is None
            chosen = self._decision(context) if asked else None
            if chosen is not None and chosen.undecided is not None:
                undecided, carried = chosen.undecided.among(near.short), chosen.state
                waiting = DeferredKV(keys, values, positions, undecided, carried, near)
                self.waiting[index] = waiting
                return
            if chosen is None:
                whole = None if near.counts is None else near.counts == context.held_len
                kept, counts = near.kept(None), near.counts
                layer.store(keys, values, positions, kept, counts=counts, whole=whole)
                return
            self._checks.look()
            layer.store(keys, values, positions, near.kept(chosen.kept), chosen.state)
            return
        remembered = index in self.history.layers
        decision = self._decision(context, remembered=remembered)
        if remembered:
            assert decision.saliency is not None
            self.history = self.history.noted(decision.saliency, context)
        if decision.undecided is not None:
            undecided, carried = decision.undecided, decision.state
            self.waiting[index] = DeferredKV(keys, values, positions, undecided, carried)
            self._take_passed(decision.passed_on, context)
            return
        # A layer that uses the slots of another layer's indexer must hold the same tokens in them.
        borrows = isinstance(layer, IndexedLayer) and layer.borrows
        if not borrows or self._kept is None:
            assert decision.kept is not None
            # Clamped, since the parts' answers are checked only later and may be out of range.
            self._kept = decision.kept.clamp(min=-1, max=keys.shape[2] - 1), decision.counts
        kept, counts = self._kept
        if self.policy.gapless:
            self._store_closed_up(index, keys, values, positions, kept, counts)
        else:
            whole = None if counts is None else counts == context.held_len
            layer.store(keys, values, positions, kept, decision.state, counts=counts, whole=whole)
        self._take_passed(decision.passed_on, context)

    def _decision(self, context: LayerContext, *, remembered: bool = False) -> Decision:
        """Let the policy decide at a layer.

        If all tokens are passed on, the parts' answers are checked after all layers have run, since
        checking waits for the device.
        """
        checks = DeferredChecks()
        try:
            decision = self.policy.decide(context, remembered=remembered, checks=checks)
        except Exception:
            self._checks.look()  # an error at an earlier layer may be the cause
            raise
        self._checks.join(checks)
        if decision.passed_on is not None:  # before other layers run on a wrong choice
            self._checks.look()
        return decision

    def _store_closed_up(
        self,
        index: int,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        kept: Tensor,
        counts: tuple[int, ...] | None,
    ) -> None:
        """Store kept keys without gaps in their positions; see `PolicyLayer.store`."""
        layer = self.layers[index]
        if layer.expands:
            raise UnsupportedModelError(
                f"layer {index} must hold the keys that it attends to where {self.policy} turns "
                "them to positions without gaps, but makes them of what it holds; use "
                "gapless=False"
            )
        assert layer.turns is not None
        slots = torch.arange(kept.shape[2], device=kept.device)
        layer.store(
            closed_up(keys, positions, kept, layer.turns),
            gather_slots(values, kept),
            gather_positions(positions, kept),
            torch.where(kept >= 0, slots, -1),
            counts=counts,
            whole=None if counts is None else True,
        )

    def _take_passed(self, passed_on: Tensor | None, context: LayerContext) -> None:
        """Remember which tokens a layer passes on; None for all."""
        passed = self._here(passed_on)
        if passed is not None and passed.shape == context.new_valid.shape:
            everything = context.new_valid.to(passed.device)
            passed = None if torch.equal(passed >= 0, everything) else passed
        self._passed = passed

    def _with_carried(self, layer: PolicyLayer, context: LayerContext) -> LayerContext:
        """Add the scorer's state to a context, with the queries of the last answer counted in."""
        decoding, observed = self.policy.decoding, layer.observed
        if decoding is None or not decoding.state_size or layer.held is None:
            return context
        carried = carried_for(observed, context.keys, decoding.state_size)
        if self._order is not None:
            carried = gather_slots(carried, self._order)
        context = attrs.evolve(context, state=carried)
        if not observed.count:
            return context
        queries, places = observed.shown(self.tokens)
        since = attrs.evolve(context, queries=queries, query_positions=places)
        return attrs.evolve(context, state=decoding.update_state(since))

    def _here(self, passed: Tensor | None) -> Tensor | None:
        """Move the slots that a layer passes on to the device of the inputs."""
        return None if passed is None else passed.to(self.new_valid.device)

    def _context(self, index: int, inputs: AttentionInputs) -> LayerContext:
        assert self._pending is not None
        queries, keys, scores = inputs.queries, inputs.keys, inputs.scores
        # Compared by number of heads, since keys may be changed and still be one for each head.
        held_as_shown = keys.shape[1] == self._pending[0].shape[1]
        shown, new_valid = self._observed(index, queries)
        layer = self.layers[index]
        positions = self._positions(layer, keys.shape[1], keys.device)
        return LayerContext(
            layer_idx=index,
            num_layers=len(self.layers),
            queries=shown,
            keys=keys,
            values=inputs.values,
            stored=None if held_as_shown and not layer.one_choice else self._pending,
            positions=positions,
            kinds=self.tokens.kinds_at(positions),
            new_valid=new_valid.to(keys.device),
            seen_len=self._seen_len,
            scaling=scores.scaling,
            softcap=scores.softcap,
            sinks=scores.sinks,
            heads=layer.spread.heads(queries.shape[1]),
            history=self.history.shown(keys.device),
            held_len=self._held_len(layer),
            rotary=self._rotary_of(layer) if self.policy.needs_rotary else None,
            output_weight=(
                layer.weight(inputs.values) if self.policy.needs_output_weight else None
            ),
        )

    def _held_len(self, layer: PolicyLayer) -> tuple[int, ...] | None:
        """See `LayerContext.held_len`."""
        return self._row_lengths.seen_by(layer)

    def _observed(self, index: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries the policy looks at, and which new slots are tokens."""
        shown = self.policy.num_queries
        first_query = 0 if shown is None else max(queries.shape[2] - shown, 0)
        return queries[:, :, first_query:], self.new_valid

    # After a layer.

    def leave_layer(self, index: int, output: Any) -> Any:
        """Cut a layer's output to the tokens it passes on, and add features."""
        passed, self._passed = self._passed, None
        hidden, *others = output if isinstance(output, tuple) else (output,)
        if passed is not None:
            self._pass_on(index, passed)
            others = [_cut_alike(each, hidden, passed) for each in others]
            hidden = self._taken(hidden, passed)
        self._beside = tuple(each for each in others if isinstance(each, Tensor))
        hidden = self._with_features_after(index, hidden)
        if self._refills and index == len(self.layers) - 1:
            self._filled = self._new_len - hidden.shape[1]
            hidden = pad(hidden, (0, 0, self._filled, 0))
        return (hidden, *others) if isinstance(output, tuple) else hidden

    def finish(self) -> SeenTokens:
        """Finish the forward; see `Forward.finish`.

        Under a ``gapless`` policy later tokens are read directly behind the tokens held.

        Raises:
            UnsupportedModelError: See `Forward.finish`.
            ValueError: See `CachePolicy.decide`, of any layer; and `without_gaps`.
        """
        self._checks.look()
        tokens = super().finish()
        if self.acts and self.policy.gapless:
            self.tokens = tokens = without_gaps(self.policy, tokens, self.layers)
            for layer in self.layers:
                layer.follow(tokens)
        return tokens

    def in_order(self, output: Any) -> Any:
        """Return the output in the order of the input; see `Forward.in_order`.

        The hidden states are those of the tokens that reached the end.
        """
        return super().in_order(self._unfilled(output) if self._filled else output)

    def _unfilled(self, output: Any) -> Any:
        def cut(states: Any) -> Any:
            if isinstance(states, tuple):  # hidden states of all layers, or attention weights
                return (*states[:-1], cut(states[-1])) if states else states
            whole = getattr(states, "ndim", 0) == 3 and states.shape[1] == self._new_len
            return states[:, self._filled :] if whole else states

        if isinstance(output, tuple):
            return tuple(map(cut, output))
        for name in {"last_hidden_state", "hidden_states"} & output.keys():
            output[name] = cut(output[name])
        return output

    def _with_features_before(self, index: int, hidden: Tensor) -> Tensor:
        """Add features to a layer's input, if they belong there."""
        if self._features is None or self._features.after:
            return hidden
        return self._features.added(hidden, index, self._slots)

    def _with_features_after(self, index: int, hidden: Tensor) -> Tensor:
        """Add features to a layer's output, if they belong there."""
        if self._features is None or not self._features.after:
            return hidden
        return self._features.added(hidden, index, self._left(hidden))

    def _left(self, hidden: Tensor) -> Tensor | None:
        """Return the slots ``[batch, count]`` of the tokens in a layer's output; None for all."""
        count = hidden.shape[self._token_axis(hidden)]
        if self._slots is not None:
            return self._slots[:, -count:]
        everything = self._new_len == count
        ends = torch.arange(self._new_len - count, self._new_len, device=self.new_valid.device)
        return None if everything else ends.expand(self.new_valid.shape[0], -1)

    def _taken(self, hidden: Tensor, slots: Tensor) -> Tensor:
        """Take the hidden states of the tokens in ``slots`` ``[batch, count]``."""
        axis = self._token_axis(hidden)
        return take_columns(hidden, slots, axis - 1, axis)

    def _pass_on(self, index: int, passed: Tensor) -> None:
        self.history = self.history.taken(passed)
        self.new_positions = gather_positions(self.new_positions, passed)
        self.new_valid = self.new_positions >= 0
        self._padded = self._row_lengths.passed_on(self.new_valid) or self._padded
        self._slots = passed if self._slots is None else gather_positions(self._slots, passed)
        self._causal.clear()
        self.propagated[index] = self.new_positions


def _cut_alike(value: Any, hidden: Tensor, slots: Tensor) -> Any:
    """Cut a layer's further output to some tokens, if it has an entry for each token."""
    # Attention weights have four axes, the second of which are heads.
    like = isinstance(value, Tensor) and value.ndim == 3 and value.shape[:2] == hidden.shape[:2]
    return take_columns(value, slots) if like else value
