"""Run a pass for the layers of one stage; the others get one token, of which nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.layer_arguments import cut_arguments
from kvpolicy.integrations.transformers.forward.passes import PassEnded, PassState
from kvpolicy.integrations.transformers.forward.stage import StagePiece
from kvpolicy.integrations.transformers.model.masks import causal_mask
from kvpolicy.integrations.transformers.state.recurrent import RecurrentLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy


class StageRun:
    """The stage of a pass under way.

    Args:
        piece: The stage, and the tokens of it that the pass reads.
        at: The pass.
        appends: Whether the pass appends its keys, since more tokens of the stage follow.

    Attributes:
        held: The hidden states that go into the next stage; None before they are known.
        attended: Keys and values of the layer inside which the stage has ended, and which of them
            are tokens (None: all); None if it ends behind a layer.
    """

    def __init__(self, piece: StagePiece, at: PassState, *, appends: bool) -> None:
        self._piece, self._stage, self._at, self._appends = piece, piece.stage, at, appends
        self._stubs: dict[int, tuple[Any, ...]] = {}  # contents of the layers outside of the stage
        self.held: Tensor | None = None
        self.attended: tuple[Tensor, Tensor, Tensor | None] | None = None

    @property
    def is_output(self) -> bool:
        """True if the decoder's output is returned."""
        return self._piece.is_output

    def holds(self, index: int) -> bool:
        """True if a layer belongs to the stage."""
        return self._stage.holds(index)

    def is_stub(self, index: int) -> bool:
        """True if a layer got one token, of which nothing is kept."""
        return index in self._stubs

    def resumes(self, index: int) -> bool:
        """True if the stage before has ended inside this layer."""
        return index == self._stage.first and self._piece.resumed is not None

    def looks(self, index: int) -> bool:
        """True if the pass ends inside this layer."""
        return index == self._stage.last and self._piece.looks

    def ends_behind(self, index: int) -> bool:
        """True if the next stage gets the output of this layer."""
        return index == self._stage.last and not self.is_output

    def check(self, hidden: Tensor, own_block: Tensor | None, policy: CachePolicy) -> None:
        """Check that a layer's tokens can be read in chunks.

        Raises:
            UnsupportedModelError: Tokens see later ones, or there are several streams of hidden
                states.
        """
        if hidden.ndim != 3 or own_block is not None:
            raise UnsupportedModelError(
                "a prompt must come in one forward where tokens see later ones or hidden states "
                f"have several streams, and {policy} drops tokens; leave prefill_chunk_size at None"
            )

    def check_output(
        self, index: int, hidden: Tensor, others: Sequence[Any], policy: CachePolicy
    ) -> None:
        """Check that a layer returns no other tensor with an entry for each token.

        Raises:
            UnsupportedModelError: It does.
        """
        if any(isinstance(each, Tensor) and each.shape[:2] == hidden.shape[:2] for each in others):
            raise UnsupportedModelError(
                "a prompt must come in one forward where layers hand on more than hidden states, "
                f"as layer {index}, and {policy} drops tokens; leave prefill_chunk_size at None"
            )

    def input_of(self, index: int, hidden: Tensor) -> Tensor:
        """Return the hidden states ``[batch, new_len, hidden]`` that a layer reads."""
        states = self._piece.states
        entered = index == self._stage.first and states is not None
        return states.to(hidden.device) if states is not None and entered else hidden

    def stub(
        self, index: int, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the arguments of a layer outside of the stage: one token, which sees itself."""
        at, layer = self._at, self._at.layers[index]
        self._stubs[index] = layer.contents, layer.beside(), layer.tokens
        if isinstance(layer, RecurrentLayer):
            layer.own_states()
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
        """End inside a layer, whose keys and values are ``seen``; see ``attended``.

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
        """End behind a layer, whose output is ``hidden``.

        Raises:
            PassEnded: The decoder runs for this stage only.
        """
        self.held = hidden
        if self._piece.nested:
            raise PassEnded

    def finish(self) -> None:
        """Let layers outside of the stage hold what they held: some have read their one token."""
        for index, state in self._stubs.items():
            self._at.layers[index].restore(*state)

    def tokens_of(self, index: int, tokens: SeenTokens) -> SeenTokens:
        """Return the tokens that a layer has seen behind the pass, given those of the pass."""
        piece, stage, own = self._piece, self._stage, self._at.layers[index].tokens
        # A layer that the stage before has ended inside has chosen already.
        reads = index >= stage.first + (piece.resumed is not None) and index <= stage.last
        if not self._appends or reads:
            return tokens
        later = piece.begun is not None and index > stage.last
        return piece.begun if piece.begun is not None and later else own or tokens
