"""Run a pass: give each layer the tokens that reach it, and observe its queries.

The functions around a model's layers and the attention functions call a `PassRun` while it is under
way.
"""

import functools
from collections.abc import Generator
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.attending import LayerAttention
from kvpolicy.integrations.transformers.forward.blocks import Narrowed, few_go_on
from kvpolicy.integrations.transformers.forward.facts import Call
from kvpolicy.integrations.transformers.forward.inputs import take_columns
from kvpolicy.integrations.transformers.forward.output_order import (
    Filling,
    in_input_order,
    without_states,
)
from kvpolicy.integrations.transformers.forward.packed_attention import Unpacked
from kvpolicy.integrations.transformers.forward.passes import KeyUse, Pass, PassEnded, PassState
from kvpolicy.integrations.transformers.forward.reaching import cut_alike, cut_arguments
from kvpolicy.integrations.transformers.model import routing
from kvpolicy.integrations.transformers.model.attachment import AroundLayer
from kvpolicy.integrations.transformers.model.masks import FLASH, Spans
from kvpolicy.integrations.transformers.model.routing import (
    Attend,
    AttentionInputs,
    without_queries,
)
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layers import follow
from kvpolicy.integrations.transformers.state.packed import Packed
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.selection import gather_slots


class PassRun:
    """One run of the decoder in progress: it prepares, observes and ends each layer.

    The layers of a model may be on several devices. Tensors about the tokens are on the device of
    the inputs. A layer's tensors, and its context, are on the device of its keys.

    Attributes:
        at: Its tokens, and where they are at the current layer.
        attentions: The attention module of each layer; None if a layer has none that can be seen.
        pending: The keys and values handed out to a layer whose attention function has not been
            called yet; None if none is awaited.
        alone: The layers before and after which nothing is done.
        propagated: For each layer that dropped tokens, the positions it passed on.
        seen: The keys and values of a layer that was run until its queries were known.
        held: The hidden states that go into the next stage; None before they are known.
        attended: Keys and values of the layer inside which the stage has ended, and which of them
            are tokens (None: all); None if it ends behind a layer.
        later: The `LaterLayers` behind the stage, once it is known which tokens reach them.
        updated: The layers that have used the cache.
        part: The run of ``later`` whose layer is under way; None if it is this run's.
        given: What the decoder gives the stage's layers, by index, if it was asked before they run.
    """

    def __init__(self, call: Call, layers: list[PolicyLayer], made: Pass) -> None:
        if made.at_queries.keys is KeyUse.DISCARD:
            own_masks = call.own_masks and made.in_prompt
            call = attrs.evolve(call, attended=None, own_masks=own_masks)
        self.call, self.made = call, made
        self.layers = layers if made.layers is None else made.layers
        self.attentions = call.model.parts.attentions
        self.at = at = PassState(call, self.layers, made)
        self.tokens = at.tokens
        self.propagated = dict(made.propagated)
        self.pending: tuple[Tensor, Tensor] | None = None
        self.seen: tuple[Tensor, Tensor] | None = None
        self._queries, self._reach, self._masks = made.at_queries, at.reach, at.masks
        self._appends = appends = made.at_queries.keys is KeyUse.APPEND
        self.stage = made.stage
        self.held: Tensor | None = None
        self.attended: tuple[Tensor, Tensor, Tensor | None] | None = None
        self.later: Any = None
        self.part: PassRun | None = None
        self.given: dict[int, tuple[Tensor, dict[str, Any]]] = {}
        self.updated: set[int] = set()
        # Moving padding before tokens leaves the last token last, but may move others. The last
        # columns that were asked for would then be confused with later tokens.
        moved = made.incoming.order is not None
        self._keep_last = None if moved and call.keep_last != 1 else call.keep_last
        self._may_narrow = self._narrowing()
        self._looking = False  # whether a layer is run until its queries are known
        self.attention = LayerAttention(call, made, at)
        self.columns = self.attention.columns
        refills = call.model.quirks.refills
        self._filling = Filling(at.reach.count) if refills else None
        self._queries.begin(at)
        self._waits = not appends or self._queries.waits()
        # Where positions have gaps, as given by the caller; see `LayerAttention.attend`.
        self._waits = self._waits or (call.implementation in FLASH and at.reach.count > 1)
        self._probe = call.probe if self._queries.asks else None
        if self._probe is not None:
            self._probe.check_places(at.before)
        plain = self.stage is None and made.features is None and self._probe is None
        spares = at.first and call.attended is None
        spares = spares and not (at.reach.padded or at.masks.may_be_own)
        known = plain and spares and call.model.quirks.spares_masks and not refills
        self.alone = self._queries.left_alone(at) if known else frozenset[int]()

    def _narrowing(self) -> frozenset[int]:
        """Return the layers that may compute output for only some of their tokens."""
        call, made = self.call, self.made
        if not (call.narrows and made.in_prompt) or made.ends_inside is not None:
            return frozenset()
        last = len(self.layers) - 1
        found = call.model.acting - {last} if made.narrows else frozenset[int]()
        if self._keep_last is not None and (self.stage is None or self.stage.is_output):
            found |= {last}
        return frozenset(index for index in found if self._masks.may_narrow(index))

    def _collected(self, around: AroundLayer, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        if around.index == 0:
            self._reach.check(around.module, hidden)
        if self.stage is not None and around.index in self.stage.stage.layers:
            self.given[around.index] = hidden, kwargs
        return self.call.model.form.of(hidden)

    def layer(self, around: AroundLayer, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        """Run a layer for all that reaches it; behind the first drop, only at the prompt's end."""
        if self.part is not None:
            return self.part._collected(around, hidden, kwargs)
        if self.made.around is not None:
            return self.made.around(self, around, hidden, kwargs)
        if self.stage is None:
            return self.run_layer(around, hidden, kwargs)
        last, then = self.stage.stage.last, self.made.then
        if around.index <= last:
            output = self.run_layer(around, hidden, kwargs)
            if then is None or around.index < last or not self.stage.looks:
                return output
        elif then is None:
            return self.call.model.form.of(hidden)
        if self.later is None:
            assert then is not None
            self.later = then(self)
        return self.later.layer(self, around)

    def run_layer(self, around: AroundLayer, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        """Run a layer for the tokens of this run that reach it; return what the next layer gets.

        Raises `PassEnded` if the pass ends inside this layer.
        """
        index, features, stage = around.index, self.made.features, self.stage
        layer = self.layers[index]
        if index == 0:
            self._reach.check(around.module, hidden)
        if self._filling is not None and self._reach.slots is not None:
            hidden = self._reach.taken(hidden, self._reach.slots)
        own = self._masks.own(kwargs) if self._masks.may_be_own else None
        if stage is not None:
            self._check_parts(hidden, own)
        if stage is not None and stage.resumed is not None and index == stage.stage.first:
            kwargs = self._resume(index, stage.resumed, kwargs)
        else:
            if features is not None and not features.after:
                hidden = features.added(hidden, index, self._reach.slots)
            if self.made.no_later and own is not None:
                raise UnsupportedModelError(self.made.no_later)
            if self._probe is not None:
                self.try_layer(around, hidden, kwargs)
            if stage is not None and stage.looks and index == stage.stage.last:
                return self._end_inside(around, hidden, kwargs)
            if index == 0:
                self._masks.check_order(kwargs, in_chunks=bool(self.made.missing))
            if index in self._may_narrow and self._narrows(index, kwargs):
                hidden, kwargs = self._narrowed(around, hidden, kwargs)
            else:
                if layer.indexed is not None:
                    layer.indexed.taking = functools.partial(self.update_index, index)
                kwargs = self.attention.arguments(index, layer, hidden, kwargs)
        output = around.forward(hidden, **kwargs)
        if not self.call.model.form.known:
            self.call.model.form.note(output)
        if self.pending is not None:
            raise UnsupportedModelError(
                "model must give an attention function the keys of the cache, or something "
                f"computed from each of them, but {type(around.module).__name__} at {index} did "
                "not; the policy saw no queries"
            )
        return self._left(index, output) if self.made.in_prompt else output

    def try_layer(self, around: AroundLayer, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        """Find what the parts of the policy must know of a layer that is about to run."""
        layer = self.layers[around.index]
        if self._probe is not None and layer.attends:
            self._probe.enter(
                around,
                layer,
                hidden,
                kwargs,
                reach=self._reach,
                before=self.at.before,
                read_at=self.at.read_at,
                implementation=self.call.implementation,
            )

    def _check_parts(self, hidden: Tensor, own: Spans | None) -> None:
        if hidden.ndim != 3 or own is not None:
            raise UnsupportedModelError(
                "a prompt must come in one forward if tokens see later ones or hidden states "
                f"have several streams, and {self.at.policy} drops tokens; leave "
                "prefill_chunk_size at None"
            )

    # A layer that is run for some of its tokens only; see `Narrowed`.

    def _narrows(self, index: int, kwargs: dict[str, Any]) -> bool:
        new_len, last = self._reach.valid.shape[1], len(self.layers) - 1
        if self._masks.own(kwargs) is not None:
            return False
        if index == last:
            return self._keep_last is not None and self._keep_last < new_len
        propagation = self.at.policy.propagation
        return few_go_on(propagation, index, len(self.layers), max(self.at.seen_len), new_len)

    def _narrowed(
        self, around: AroundLayer, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Let the policy choose in a layer's first run; return the arguments of its second run."""
        here = self._reach.arguments(kwargs)
        valid = self._look(around, hidden, here)
        slots = self._going_on(around.index)
        assert self.seen is not None
        keys, values = self.seen
        new_len = hidden.shape[self._reach.token_axis(hidden)]
        own = torch.where(slots < 0, -1, slots + keys.shape[2] - new_len).to(keys.device)
        self.attention.narrowed = Narrowed(keys, values, own, valid, self.call.implementation)
        here = cut_arguments({**here, "attention_mask": None}, slots, new_len)
        self.attention.note_places(here)
        return self._reach.taken(hidden, slots), here

    def _look(self, around: AroundLayer, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Run a layer just until its queries and keys are known and the policy has seen them.

        In a stage, the first layer that ever runs is run whole, to learn what layers return.
        Returns which of the layer's keys are tokens; None if all are.
        """
        layer = self.layers[around.index]
        self.attention.inside = around.index
        self._masks.enter(layer)
        valid = self._masks.valid_slots(layer)
        self.attention.note_places(kwargs)
        self._looking = True
        try:
            self.call.model.form.note(around.forward(hidden, **{**kwargs, "attention_mask": None}))
        except PassEnded:
            pass
        finally:
            self._looking = False
        assert self.seen is not None
        return None if valid is None else valid.to(self.seen[0].device)

    def _going_on(self, index: int) -> Tensor:
        """Return the indices ``[batch, count]`` of the tokens whose output is needed."""
        passed = self._take_passed()
        slots = self._reach.everything() if passed is None else passed
        if passed is not None:
            self._pass_on(index, passed)
        if index < len(self.layers) - 1 or self._keep_last is None:
            return slots
        return slots[:, max(slots.shape[1] - self._keep_last, 0) :]

    def _end_inside(self, around: AroundLayer, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        """End the stage inside its last layer, once the layer's queries and keys are known."""
        valid = self._look(around, hidden, self._reach.arguments(kwargs))
        assert self.seen is not None
        self.held = hidden
        if not self._appends:
            self.attended = *self.seen, valid
        self.pending = self.seen = None
        return self.call.model.form.of(hidden)

    def _resume(self, index: int, resumed: Narrowed, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments to run the rest of a layer in which an earlier run stopped."""
        self.attention.narrowed = resumed
        self.seen = resumed.keys, resumed.values
        self.updated.add(index)
        here = {**self._reach.arguments(kwargs), "attention_mask": None}
        self.attention.note_places(here)
        return here

    # Inside its attention.

    def update(
        self, index: int, keys: Tensor, values: Tensor, module: nn.Module | None
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values; return all keys and values its attention must see.

        ``module`` is the attention module whose function will get them; None if that cannot be
        seen.
        """
        layer = self.layers[index]
        if layer.crossing is not None:
            images: tuple[Tensor, Tensor] = layer.crossing.with_images(keys, values)
            return images
        if self.seen is None:
            self.updated.add(index)
            keys, values = self._taken_in(index, keys, values)
        attention = self.attention
        waits = self._waits or self.seen is not None or layer.contents.padded
        waits = waits or attention.told is not None
        if not layer.facts.shows_queries:
            seen = without_queries(layer.facts.query_heads, keys, values)
            self._queries.observe(self.at, index, seen, (keys, values))
        elif waits or self.call.model.temperatures[index] is not None:
            assert module is not None
            self.pending = keys, values
            routing.waiting.set((self, index, module, keys))
        return keys, values

    def _taken_in(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's held and new keys and values; store the new ones if the pass appends."""
        layer = self.layers[index]
        if self.attention.packed:
            packed = layer.contents.held
            assert isinstance(packed, Packed)
            layer.held = packed = packed.appended(keys, values)
            return Unpacked.pair(packed)
        if self._appends and index not in self._queries.holding_anew:
            keys, values = layer.append(keys, values, self.at.before, self.made.missing)
        else:
            if layer.contents.held is not None:
                keys, values = layer.join(keys, values)
            order = self._masks.order
            if order is not None:
                keys, values = gather_slots(keys, order), gather_slots(values, order)
        if layer.indexed is not None:
            layer.indexed.attended = keys
        return keys, values

    def update_index(self, index: int, keys: Tensor) -> Tensor:
        """Add a layer's new index keys; return all index keys that its indexer must see."""
        layer, slots = self.layers[index].indexed, self._reach.slots
        # A model that rotates index keys late gives their position ids to one of the layers.
        given = (each.indexed.new_places for each in self.layers if each.indexed is not None)
        places = next((each for each in given if each is not None), None)
        if places is not None and slots is not None:
            places = take_columns(places, slots, 1, 2)
        every: Tensor = (
            layer.append_index(keys, places)
            if self._appends
            else layer.show_index(keys, places, self._masks.order)
        )
        return every

    def attend(
        self,
        index: int,
        attend: Attend,
        module: nn.Module,
        inputs: AttentionInputs,
        mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a layer's attention by its own function, and show the policy its queries."""
        given = self.pending
        assert given is not None
        temperature = None if index in self.alone else self.call.model.temperatures[index]
        if temperature is not None:
            places = self.attention.places
            queries = temperature.corrected(inputs.queries, self.at.before.seen, places)
            inputs = attrs.evolve(inputs, queries=queries)
        read = inputs.queries, inputs.keys, inputs.values
        looks, again = self._looking or index == self.made.ends_inside, self.seen is not None
        if looks:
            self.seen = inputs.keys, inputs.values
        elif index in self.alone:
            output = attend(module, *read, mask, **kwargs)
        else:
            output = self.attention.attend(attend, module, inputs, mask, given, **kwargs)
        self.pending = None
        if not again:
            self._queries.observe(self.at, index, inputs, given)
        if self._looking and self.stage is not None and not self.call.model.form.known:
            return attend(module, *read, None, **kwargs)
        if looks:
            raise PassEnded
        self.seen = self.attention.narrowed = None
        return output

    # After a layer, and after the last.

    def _left(self, index: int, output: Any) -> Any:
        """Return a layer's output, cut to the tokens that the next layer gets."""
        hidden, *others = output if isinstance(output, tuple) else (output,)
        if self.stage is not None and others:
            self._check_others(index, hidden, others)
        if index == len(self.layers) - 1:
            self.at.last_hidden = hidden.select(self._reach.token_axis(hidden), -1)
        return self.cut_output(index, output, self.made.features)

    def cut_output(self, index: int, output: Any, features: AddedFeatures | None = None) -> Any:
        """Cut a layer's output for all that reach it; add image features behind the layer."""
        hidden, *others = output if isinstance(output, tuple) else (output,)
        stage, passed = self.stage, self._take_passed()
        if passed is not None:
            self._pass_on(index, passed)
            others = [cut_alike(each, hidden, passed) for each in others]
            hidden = self._reach.taken(hidden, passed)
        self._reach.beside = tuple(each for each in others if isinstance(each, Tensor))
        if features is not None and features.after:
            hidden = features.added(hidden, index, self._reach.slots_in(hidden))
        if stage is not None and index == stage.stage.last and not stage.is_output:
            self.held = hidden
        if self._filling is not None:
            slots = self._reach.slots_in(hidden)
            hidden = self._filling.filled(index, hidden, slots, self._reach.token_axis(hidden))
        return (hidden, *others) if isinstance(output, tuple) else hidden

    def _check_others(self, index: int, hidden: Tensor, others: list[Any]) -> None:
        """Check that a layer's extra outputs have no entry for each token."""
        if any(isinstance(each, Tensor) and each.shape[:2] == hidden.shape[:2] for each in others):
            raise UnsupportedModelError(
                "a prompt must come in one forward if layers hand on more than hidden states, as "
                f"layer {index} does, and {self.at.policy} drops tokens; leave "
                "prefill_chunk_size at None"
            )

    def _take_passed(self) -> Tensor | None:
        """Return the tokens that the layer passes on, once; None for all, or in a stage."""
        if self.stage is not None:
            return None
        passed, self._queries.passed = self._queries.passed, None
        return passed

    def _pass_on(self, index: int, passed: Tensor) -> None:
        self._queries.drop(passed)
        self._reach.pass_on(passed)
        self.propagated[index] = self._reach.positions

    def finish(self) -> SeenTokens:
        """Check that every layer used the cache; return the new record of seen tokens."""
        stage, everything = self.stage, range(len(self.layers))
        own = everything if stage is None else stage.stage.layers
        tokens = self._queries.finish(self.at) if own else self.tokens
        # A layer that attends to images is skipped without them.
        using = (each.attends or each.recurrent is not None for each in self.layers)
        missing = {index for index, uses in enumerate(using) if uses and index in own}
        missing -= self.updated
        if missing:
            raise UnsupportedModelError(
                f"model must give every layer the cache, but layers {sorted(missing)} did not "
                "update it; gradient checkpointing has to be off"
            )
        if self.later is not None:
            tokens = self.later.finish()
            self.propagated |= self.later.propagated
        # Layers behind a stage hold nothing of the prompt before it has ended.
        follow(self.layers[own.start : own.stop] if self._appends else self.layers, tokens)
        self.tokens = tokens
        return tokens

    def in_order(self, output: Any) -> Any:
        """Return the decoder's output with the tokens that reached the end in the input's order."""
        if self._filling is not None:
            output = self._filling.cut(output)
        if self.stage is not None and not self.stage.is_output and self.later is None:
            output = without_states(output)  # it is not yet known which are passed on
        order = None if self.later is not None else self.made.incoming.order
        return in_input_order(output, self.tokens, order, self.propagated, self.call.attended)


# Is sent the run of every pass that it yields.
Passes = Generator[Pass, PassRun, None]
