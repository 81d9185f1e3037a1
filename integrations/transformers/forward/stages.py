"""Read the layers of a chunked prompt in stages, if tokens of the prompt are dropped.

A stage is the layers that one set of tokens reads. The tokens that are passed on are known only at
the end of the prompt, so layers behind a drop cannot run before. A forward over a chunk runs the
layers of the first stage, and leaves the hidden states that go into the next stage.
`staged_prefill` reads the other stages at the end of the prompt. A decoder always runs all of its
layers: layers outside of the current stage get one token, of which nothing is kept.
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
from kvpolicy.integrations.transformers.forward.staged_prompt import PrefillStage
from kvpolicy.integrations.transformers.model.masks import causal_mask
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.layer import PolicyLayer, State
from kvpolicy.integrations.transformers.state.recurrent import EmptyLayer, RecurrentLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import gather_positions


class StageRead(Exception):  # noqa: N818 -- not an error: it ends a run early
    """A signal that ends a run, once the layers of a stage are done."""


def stages_of(
    policy: CachePolicy, num_layers: int, few_go_on: Callable[[int], bool]
) -> tuple[PrefillStage, ...]:
    """Return the stages of a prompt in their order.

    Args:
        policy: A policy whose propagation drops tokens or restarts.
        num_layers: Number of layers of the model.
        few_go_on: A function of a layer's index: True if the layer passes on so few tokens that
            running it twice is worth it.
    """
    acting = sorted(policy.propagation.acting_layers(num_layers))
    if policy.propagation.restarts:
        return PrefillStage(0, acting[0], looks=True), PrefillStage(0, num_layers - 1)
    stages, first = [], 0
    for layer in acting:
        if layer < num_layers - 1:  # no layer follows the last one
            looks = few_go_on(layer)
            stages.append(PrefillStage(first, layer, looks))
            first = layer if looks else layer + 1
    return *stages, PrefillStage(first, num_layers - 1)


@attrs.frozen(eq=False)
class StageInput:
    """A range of tokens that one forward reads in one stage.

    Args:
        stage: The stage.
        looks: Whether the forward ends inside the stage's last layer.
        is_output: Whether the decoder's output is returned; true in the last stage.
        nested: Whether the decoder runs for this stage only, so that it may end with the stage.
        inputs: See `StagedPrompt`; for a chunk in the first stage.
        tokens: The tokens seen, this piece included, for layers of a later stage; None in the first
            stage.
        started: ``[batch]`` bool, rows in which layers have read tokens before.
        states: ``[batch, new_len, hidden]``, the input of the stage's first layer; None for the
            input from the decoder.
        resumed: The second run of the first layer, if the previous stage ended inside it.
        history: The saliency that layers of earlier stages gave to all tokens that reach the stage;
            None in the first stage and after a restart.
    """

    stage: PrefillStage
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
    """A base class for forwards over a piece of a prompt in one stage.

    Attributes:
        held: The hidden states that go into the next stage; None before they are known.
    """

    def __init__(self, *args: Any, piece: StageInput, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._piece = piece
        self._stubs: dict[int, State] = {}  # states of the layers outside of the stage
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
        """True if the stage only chooses tokens and stores nothing.

        This is so in the first stage of a prefill that restarts.
        """
        first = self._piece.tokens is None
        return self.policy.propagation.restarts and first

    def _holds(self, index: int) -> bool:
        return self._piece.stage.first <= index <= self._piece.stage.last

    # Before a layer.

    def enter_layer(
        self, index: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the arguments of the piece or, outside of the stage, of one token.

        See `Forward.enter_layer`.

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
            # The next stage begins with this layer, so that its features are added here.
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
        """Return the arguments of a layer outside of the stage: one token, which sees itself."""
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
        # A stage ends inside its other layers of this kind, and the next stage resumes them.
        return self._piece.is_output and index == len(self.layers) - 1 and super()._few_go_on(index)

    # Inside its attention.

    def columns(self, index: int) -> Columns | None:
        """Refuse attention that measures distances in columns; see `Forward.columns`.

        Raises:
            UnsupportedModelError: The layer's attention measures distances in columns.
        """
        if self._inside == index and not (self.first and self._slots is None):
            raise UnsupportedModelError(
                f"a prompt must come in one forward where attention counts columns, as that of "
                f"layer {index}, and {self.policy} drops tokens; leave prefill_chunk_size at None"
            )
        return None

    def update(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer; outside of the stage, only one token's.

        See `Forward.update`.
        """
        if index in self._stubs:
            return keys, values
        return super().update(index, keys, values)

    def _held_len(self, layer: PolicyLayer) -> None:
        """Return None: layers may hold other tokens than the forward knows."""

    # After a layer.

    def leave_layer(self, index: int, output: Any) -> Any:
        """Return the layer's output; at the end of the stage, hold it for the next stage.

        Raises:
            UnsupportedModelError: The layer returns another tensor with an entry for each token.
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
        """Finish the layers of the stage; see `ActingForward.finish`."""
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
        """Tell the layers which tokens have been seen."""
        for layer in self.layers:
            layer.follow(self.tokens)


class StageChunk(StageForward, ChunkForward):
    """A forward that appends a piece before the last of its stage, and remembers its queries."""

    @property
    def chunks(self) -> Any:
        """The chunks of the prompt so far, or the pieces of the stage so far."""
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
        first = stage.first + (self._piece.resumed is not None)  # a resumed layer has chosen
        for layer in self.layers[first : stage.last + 1]:
            layer.follow(self.tokens)
        if staged is None:
            return
        begun = staged.begun  # other layers hold nothing of the prompt yet
        tokens = attrs.evolve(self.tokens, appended=begun.appended, appended_ids=begun.appended_ids)
        for layer in self.layers[stage.last + 1 :]:
            layer.follow(tokens)

    def in_order(self, output: Any) -> Any:
        """Return the output without hidden states: it is not yet known which are passed on."""
        if isinstance(output, tuple):
            return (output[0][:, :0], *output[1:])
        output["last_hidden_state"] = output["last_hidden_state"][:, :0]
        return output


class StageEnd(StageForward, LastChunkForward):
    """A forward that ends a stage: the policy acts on all tokens that the stage has read.

    Attributes:
        passed: The slots ``[batch, passed_len]`` of the tokens that are passed on, among those that
            reached the stage with padding before them; None for all.
        attended: Keys and values of the layer that the next stage resumes, and which of them are
            tokens; None if it resumes none.
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
        """Let the policy decide; before a restart, only score the layer if that is needed.

        See `Forward.observe`.
        """
        if self._restarts:
            if index in self.history.layers:
                context = self._context(index, inputs)
                self.history = self.history.noted(self.policy.score(context), context)
            self._pending = None
        else:
            super().observe(index, inputs)


def taken_from(parts: Sequence[Tensor], columns: Tensor) -> Tensor:
    """Take some columns from consecutive tensors.

    Args:
        parts: ``[batch, len, ...]`` each; only their lengths may differ.
        columns: ``[batch, count]`` int64, columns in the concatenation of all parts; -1 gives
            zeros.

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
