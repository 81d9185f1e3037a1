"""Run a pass for the layers of one stage; the others get one token, of which nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.layer_arguments import cut_arguments
from kvpolicy.integrations.transformers.forward.passes import PassEnded, PassState
from kvpolicy.integrations.transformers.forward.stage import StagePiece
from kvpolicy.integrations.transformers.model.masks import causal_mask
from kvpolicy.integrations.transformers.state.layers import Held, follow, held_by, hold_again
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


class StageRun:
    """A pass's run through one range of layers, with what it leaves for the next range.

    Args:
        piece: The stage, and the tokens of it that the pass reads.
        at: The pass.
        appends: Whether the pass appends its keys, since more tokens of the stage follow.

    Attributes:
        layers: The layers of the stage.
        resumed: Index of the layer inside which the stage before has ended; None if it has ended
            behind one.
        looked: Index of the layer inside which the pass ends; None if it ends behind one.
        last_behind: Index of the layer whose output the next stage gets; None in the last stage.
        is_output: Whether the decoder's output is returned.
        stubs: What the layers outside of the stage held before they got their token, by index.
        held: The hidden states that go into the next stage; None before they are known.
        attended: Keys and values of the layer inside which the stage has ended, and which of them
            are tokens (None: all); None if it ends behind a layer.
    """

    def __init__(self, piece: StagePiece, at: PassState, *, appends: bool) -> None:
        stage = piece.stage
        self._piece, self._at, self._appends = piece, at, appends
        self.layers = range(stage.first, stage.last + 1)
        self.resumed = None if piece.resumed is None else stage.first
        self.looked = stage.last if piece.looks else None
        self.is_output = piece.is_output
        self.last_behind = None if piece.is_output else stage.last
        self.stubs: dict[int, Held] = {}
        self.held: Tensor | None = None
        self.attended: tuple[Tensor, Tensor, Tensor | None] | None = None

    def enter(
        self, index: int, hidden: Tensor, kwargs: dict[str, Any], own_block: Tensor | None
    ) -> tuple[Tensor, dict[str, Any], bool]:
        """Return a layer's input and arguments, and whether this pass leaves the layer out.

        Args:
            index: Index of the layer.
            hidden: Its input.
            kwargs: Its other arguments, by name.
            own_block: See `LayerMasks.own_block`.

        Raises:
            UnsupportedModelError: Tokens see later ones, or there are several streams of hidden
                states.
        """
        if hidden.ndim != 3 or own_block is not None:
            raise UnsupportedModelError(
                "a prompt must come in one forward if tokens see later ones or hidden states "
                f"have several streams, and {self._at.policy} drops tokens; leave "
                "prefill_chunk_size at None"
            )
        if index not in self.layers:
            return *self.stub(index, hidden, kwargs), True
        states = self._piece.states
        entered = index == self.layers.start and states is not None
        return states.to(hidden.device) if states is not None and entered else hidden, kwargs, False

    def check_output(self, index: int, hidden: Tensor, others: Sequence[Any]) -> None:
        """Check that a layer's extra outputs have no entry for each token.

        Raises:
            UnsupportedModelError: It does.
        """
        if any(isinstance(each, Tensor) and each.shape[:2] == hidden.shape[:2] for each in others):
            raise UnsupportedModelError(
                "a prompt must come in one forward if layers hand on more than hidden states, as "
                f"layer {index} does, and {self._at.policy} drops tokens; leave "
                "prefill_chunk_size at None"
            )

    def stub(
        self, index: int, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the arguments for a layer that this pass leaves out: only one token."""
        at, layer = self._at, self._at.layers[index]
        self.stubs[index] = held_by([layer])[0]
        if layer.recurrent is not None:
            layer.recurrent.own_states()
        hidden, count = hidden[:, -1:], at.reach.count
        last = at.reach.valid.new_full((hidden.shape[0], 1), count - 1, dtype=torch.int64)
        here = {**cut_arguments(kwargs, last, count), "attention_mask": None}
        here |= dict.fromkeys({"conv_mask"} & kwargs.keys())
        if layer.attends and not at.call.model.quirks.spares_masks:
            here["attention_mask"] = causal_mask(
                1,
                1,
                implementation=at.call.implementation,
                dtype=hidden.dtype,
                device=hidden.device,
                spare=False,
            )
        return hidden, here

    def end_inside(self, hidden: Tensor, seen: tuple[Tensor, Tensor], valid: Tensor | None) -> None:
        """End the pass inside a layer, whose keys and values ``seen`` the next pass needs.

        Args:
            hidden: The layer's input.
            seen: Its keys and values.
            valid: Which of them are tokens.

        Raises:
            PassEnded: The decoder runs for this stage only.
        """
        self.held = hidden
        if not self._appends:
            self.attended = *seen, valid
        if self._piece.nested:
            raise PassEnded

    def end_behind(self, hidden: Tensor) -> None:
        """End the pass after a layer, whose output ``hidden`` the next pass needs.

        Raises:
            PassEnded: The decoder runs for this stage only.
        """
        self.held = hidden
        if self._piece.nested:
            raise PassEnded

    def finish(self, tokens: SeenTokens) -> None:
        """Restore the layers that the pass has left out, and update the record of seen tokens.

        Layers outside of the stage hold what they held: some have read their one token.
        """
        layers, begun = self._at.layers, self._piece.begun
        hold_again([layers[index] for index in self.stubs], tuple(self.stubs.values()))
        if not self._appends:
            follow(layers, tokens)
            return
        # A layer that the stage before has ended inside has chosen already.
        follow(layers[self.layers.start + (self.resumed is not None) : self.layers.stop], tokens)
        if begun is not None:  # later layers hold nothing of the prompt yet
            none, ids = begun.appended, begun.appended_ids
            tokens = attrs.evolve(tokens, appended=none, appended_ids=ids)
            follow(layers[self.layers.stop :], tokens)
