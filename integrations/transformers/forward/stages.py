"""Prompts in chunks of which tokens are dropped: a stage is what one set of tokens reads.

What goes on is known when the prompt has ended, and layers behind a drop cannot be run before.
So a forward over a chunk runs the layers of the first stage, and leaves the hidden states that go
into the next; `staged_prefill` reads the other stages at the prompt's end. A decoder runs all of
its layers: those outside of the stage at hand get one token, of which nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.chunked_prefill import (
    ChunkForward,
    LastChunkForward,
)
from kvpolicy.integrations.transformers.forward.history import History
from kvpolicy.integrations.transformers.forward.layer_arguments import cut_arguments
from kvpolicy.integrations.transformers.forward.narrowing import Narrowed
from kvpolicy.integrations.transformers.forward.prefill import ActingForward
from kvpolicy.integrations.transformers.forward.relative_positions import Columns
from kvpolicy.integrations.transformers.forward.staged_prompt import Stage
from kvpolicy.integrations.transformers.model.masks import causal_mask
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.layer import PolicyLayer, State
from kvpolicy.integrations.transformers.state.recurrent import EmptyLayer, RecurrentLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import gather_positions


class StageRead(Exception):  # noqa: N818 -- not an error: it ends a run that has served
    """The layers of a stage are done; what follows is not needed now."""


def stages_of(
    policy: CachePolicy, num_layers: int, few_go_on: Callable[[int], bool]
) -> tuple[Stage, ...]:
    """The stages of a prompt, in their order.

    Args:
        policy: One whose propagation drops tokens or restarts.
        num_layers: Layers of the model.
        few_go_on: Whether so few tokens leave a layer that it is worth to run it for these alone.
    """
    acting = sorted(policy.propagation.acting_layers(num_layers))
    if policy.propagation.restarts:
        return Stage(0, acting[0], looks=True), Stage(0, num_layers - 1)
    stages, first = [], 0
    for layer in acting:
        if layer < num_layers - 1:  # behind the last one nothing is computed
            looks = few_go_on(layer)
            stages.append(Stage(first, layer, looks))
            first = layer if looks else layer + 1
    return *stages, Stage(first, num_layers - 1)


@attrs.frozen(eq=False)
class Piece:
    """Tokens that a forward reads in one stage.

    Args:
        stage: The stage.
        looks: Whether the forward ends inside of the stage's last layer.
        is_output: Whether the decoder's output is returned, which is that of the last stage.
        nested: Whether the decoder is run for this stage alone, so that it may end with it.
        inputs: See `StagedPrompt`; of the chunk, in the first stage.
        tokens: Those seen with it, for layers of a later stage; None in the first.
        started: ``[batch]`` bool, rows of which layers have read something before.
        states: ``[batch, new_len, hidden]``, what goes into the first layer; None for what the
            decoder gives it.
        resumed: The first layer's attention, where the stage before has ended inside of it.
        history: What earlier stages' layers found salient, of all tokens that reach the stage;
            None in the first, and after a restart.
    """

    stage: Stage
    looks: bool = False
    is_output: bool = False
    nested: bool = True
    inputs: Mapping[str, Tensor] = attrs.field(factory=dict)
    tokens: SeenTokens | None = None
    started: Tensor | None = None
    states: Tensor | None = None
    resumed: Narrowed | None = None
    history: History | None = None


class StageForward(ActingForward):
    """What forwards over a piece of a prompt have in common, whether it is their stage's last.

    Attributes:
        held: The hidden states that go into the next stage; None before.
    """

    def __init__(self, *args: Any, piece: Piece, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._piece = piece
        self._stubs: dict[int, State] = {}  # by layer outside of the stage, what it held before
        self.held: Tensor | None = None
        if piece.tokens is not None:
            self.tokens = piece.tokens
            self.first = False
            self._seen_len = tuple(piece.tokens.lengths.tolist())
            self._padded = self._padded or bool((piece.tokens.appended < 0).any())
        if piece.started is not None:
            self._started = piece.started
        if piece.history is not None:
            self.history = piece.history

    @property
    def _restarts(self) -> bool:
        """Whether nothing of the stage is kept but the choice of tokens."""
        first = self._piece.tokens is None
        return self.policy.propagation.restarts and first

    def _holds(self, index: int) -> bool:
        return self._piece.stage.first <= index <= self._piece.stage.last

    # Before a layer.

    def enter_layer(
        self, index: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """See `Forward.enter_layer`; outside of the stage, the arguments of one token.

        Raises:
            UnsupportedModelError: Tokens see later ones, or there are several streams of hidden
                states.
        """
        piece, stage = self._piece, self._piece.stage
        if index == 0:
            self._check_tokens(module, hidden)
        if hidden.ndim != 3 or self._own_block(kwargs) is not None:
            raise UnsupportedModelError(
                "a prompt must come in one forward where tokens see later ones or hidden states "
                f"have several streams, and {self.policy} drops tokens; leave prefill_chunk_size "
                "at None"
            )
        if not self._holds(index):
            return self._stub(index, hidden, kwargs)
        if index == stage.first and piece.states is not None:
            hidden = piece.states.to(hidden.device)
        if index == stage.first and piece.resumed is not None:
            self._narrowed = piece.resumed
            self._seen = piece.resumed.keys, piece.resumed.values
            self._updated.add(index)
            here = {**self._reaching(kwargs), "attention_mask": None}
            self._note_places(here)
            return hidden, here
        if index == stage.last and piece.looks:
            # What goes into the next stage, which begins with this layer, has its features.
            hidden = self._with_features_before(index, hidden)
            return self._end_inside(index, module, hidden, kwargs)
        return super().enter_layer(index, module, hidden, kwargs)

    def _end_inside(
        self, index: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Run the stage's last layer until its queries and keys are known."""
        self._combine(self.layers[index])
        self._look(module, hidden, self._reaching(kwargs))
        self.held = None if self._restarts else hidden
        if self._piece.nested:
            raise StageRead
        self._pending = self._seen = None
        return self._stub(index, hidden, kwargs)

    def _stub(
        self, index: int, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """The arguments of a layer outside of the stage: those of one token, which sees itself."""
        layer = self.layers[index]
        self._stubs[index] = layer.state()
        if isinstance(layer, RecurrentLayer):
            layer.own_states()
        hidden = hidden[:, -1:]
        last = self.new_valid.new_full((hidden.shape[0], 1), self._new_len - 1, dtype=torch.int64)
        here = {**cut_arguments(kwargs, last, self._new_len), "attention_mask": None}
        here |= dict.fromkeys({"conv_mask"} & kwargs.keys())
        if layer.attends and not self._spares_masks:
            here["attention_mask"] = causal_mask(
                1,
                1,
                implementation=self.implementation,
                dtype=hidden.dtype,
                device=hidden.device,
                spare=False,
            )
        return hidden, here

    def _few_go_on(self, index: int) -> bool:
        # Other layers are ended inside of, and resumed by the next stage.
        return self._piece.is_output and index == len(self.layers) - 1 and super()._few_go_on(index)

    # Inside its attention.

    def columns(self, index: int) -> Columns | None:
        """See `Forward.columns`.

        Raises:
            UnsupportedModelError: The layer's attention counts how far keys lie by columns.
        """
        if self._inside == index and not (self.first and self._slots is None):
            raise UnsupportedModelError(
                f"a prompt must come in one forward where attention counts columns, as that of "
                f"layer {index}, and {self.policy} drops tokens; leave prefill_chunk_size at None"
            )
        return None

    def update(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Forward.update`; a layer outside of the stage sees its one token."""
        if index in self._stubs:
            return keys, values
        return super().update(index, keys, values)

    def _held_len(self, layer: PolicyLayer) -> None:
        """Not known: layers are told of other tokens than the forward."""

    # After a layer.

    def leave_layer(self, index: int, output: Any) -> Any:
        """The layer's output; at the stage's end what goes into the next is held.

        Raises:
            UnsupportedModelError: The layer returns something else for each of its tokens.
        """
        if index in self._stubs:
            return output
        hidden, *others = output if isinstance(output, tuple) else (output,)
        if any(isinstance(each, Tensor) and each.shape[:2] == hidden.shape[:2] for each in others):
            raise UnsupportedModelError(
                "a prompt must come in one forward where layers hand on more than hidden states, "
                f"as layer {index}, and {self.policy} drops tokens; leave prefill_chunk_size at "
                "None"
            )
        if index != self._piece.stage.last or self._piece.is_output:
            return super().leave_layer(index, output)
        self.held = self._with_features_after(index, hidden)
        if self._piece.nested:
            raise StageRead
        return output

    def finish(self) -> SeenTokens:
        """See `ActingForward.finish`; of the stage's layers alone."""
        self._checks.look()
        for index, state in self._stubs.items():
            self.layers[index].restore(state)  # recurrent layers have read their one token
        missing = {
            index
            for index, layer in enumerate(self.layers)
            if self._holds(index) and not isinstance(layer, EmptyLayer)
        } - self._updated
        if missing:
            raise UnsupportedModelError(
                f"model must give every layer the cache, but layers {sorted(missing)} did not "
                "update it; gradient checkpointing has to be off"
            )
        self._tell_layers()
        return self.tokens

    def _tell_layers(self) -> None:
        """Let layers know which tokens have been seen."""
        for layer in self.layers:
            layer.follow(self.tokens)


class StageChunk(StageForward, ChunkForward):
    """A forward over a piece that does not end its stage: appended, its queries remembered."""

    @property
    def chunks(self) -> Any:
        """The prompt so far, or what the stage has read of it."""
        chunks = super().chunks
        if chunks.staged is None:
            return chunks
        staged = chunks.staged.with_chunk(
            self.new_valid, self._piece.inputs, self.held, self._features
        )
        return attrs.evolve(chunks, staged=staged)

    def _decide(self, index: int, inputs: AttentionInputs) -> None:
        super()._decide(index, inputs)
        looked_at = index == self._piece.stage.last or index in self.history.layers
        if self._restarts and not looked_at:
            self._queries.pop(index, None)
            self._carried.pop(index, None)

    def _tell_layers(self) -> None:
        staged, stage = self._chunks.staged, self._piece.stage
        first = stage.first + (self._piece.resumed is not None)  # which has chosen what it keeps
        for layer in self.layers[first : stage.last + 1]:
            layer.follow(self.tokens)
        if staged is None:
            return
        begun = staged.begun  # other layers hold nothing of the prompt yet
        tokens = attrs.evolve(self.tokens, appended=begun.appended, appended_ids=begun.appended_ids)
        for layer in self.layers[stage.last + 1 :]:
            layer.follow(tokens)

    def in_order(self, output: Any) -> Any:
        """The decoder's output without hidden states: which of them go on is not known yet."""
        if isinstance(output, tuple):
            return (output[0][:, :0], *output[1:])
        output["last_hidden_state"] = output["last_hidden_state"][:, :0]
        return output


class StageEnd(StageForward, LastChunkForward):
    """The forward that ends a stage: the policy acts on all that the stage has read.

    Attributes:
        passed: Of the tokens that reached the stage, with padding before them, those that go on,
            ``[batch, passed_len]``; None for all.
        attended: Keys and values of the layer that the next stage is to resume, and which of them
            are tokens; None without such.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.passed: Tensor | None = None
        self.attended: tuple[Tensor, Tensor, Tensor | None] | None = None

    def _end_inside(
        self, index: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        self._combine(self.layers[index])
        valid = self._valid_slots(self.layers[index])
        try:
            return super()._end_inside(index, module, hidden, kwargs)
        except StageRead:
            assert self._seen is not None
            keys, values = self._seen
            self.attended = keys, values, None if valid is None else valid.to(keys.device)
            raise

    def _decide(self, index: int, inputs: AttentionInputs) -> None:
        if not self._restarts:
            layer = self.layers[index]
            places = self._positions(layer, layer.choices, self.new_valid.device)[:, 0]
            super()._decide(index, inputs)
            self.passed, self._passed = self._passed, None
            if self._piece.is_output and self.passed is not None:  # behind the last layer
                new_len = self._chunks.columns + self.new_valid.shape[1]
                self.propagated[index] = gather_positions(places[:, -new_len:], self.passed)
        elif index == self._piece.stage.last:
            self.passed = self._here(self.policy.decide_restart(self._context(index, inputs)))

    def observe(self, index: int, inputs: AttentionInputs) -> None:
        """See `Forward.observe`; before a restart nothing is kept but what is looked at there."""
        if self._restarts:
            if index in self.history.layers:
                context = self._context(index, inputs)
                self.history = self.history.noted(self.policy.score(context), context)
            self._pending = None
        else:
            super().observe(index, inputs)


def taken_from(parts: Sequence[Tensor], columns: Tensor) -> Tensor:
    """Some columns of tensors that stand one after the other.

    Args:
        parts: ``[batch, len, ...]`` each, alike but for the length.
        columns: ``[batch, count]`` int64, of all of them; -1 for zeros.

    Returns:
        ``[batch, count, ...]``.
    """
    columns = columns.to(parts[0].device)
    found = parts[0].new_zeros(*columns.shape, *parts[0].shape[2:])
    start = 0
    for part in parts:
        stop = start + part.shape[1]
        rows, places = ((columns >= start) & (columns < stop)).nonzero(as_tuple=True)
        if len(rows):
            found[rows, places] = part[rows, columns[rows, places] - start]
        start = stop
    return found
