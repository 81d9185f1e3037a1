"""When an answer is decoded into buffers of a fixed size: how that begins, goes on and ends.

`generate` asks for a mask before every token. In that moment, between two steps of which any part
may be compiled, the token is counted and layers choose what they keep.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.decoding.static_choosing import StaticChoice
from kvpolicy.integrations.transformers.forward.decoding.static_rolling import RollingDecoding
from kvpolicy.integrations.transformers.forward.inputs import check_step
from kvpolicy.integrations.transformers.forward.static_decoding import (
    BeforeLayer,
    StaticDecoding,
    before_decoder,
)
from kvpolicy.integrations.transformers.model.attachment import Attachment
from kvpolicy.integrations.transformers.model.kinds import LatentAttention
from kvpolicy.integrations.transformers.model.rotary import changes_with_length
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.observed import Observed
from kvpolicy.integrations.transformers.state.storage import PlainStorage, Storage
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy


class Answered(Protocol):
    """What is known where an answer is decoded, and changes with its tokens; see `Reader`."""

    policy: CachePolicy
    placed: CachePolicy
    storage: Storage
    max_new_tokens: int | None
    layers: list[PolicyLayer]
    tokens: SeenTokens | None
    attachment: Attachment | None

    @property
    def acts_next(self) -> bool:
        """Whether the policy acts on the next forward, which decodes nothing then."""

    def abandon_forward(self) -> None:
        """Undo a call of the model that did not come to its end."""


class FixedAnswer:
    """The answers of one cache, as far as they are decoded into buffers of a fixed size.

    Args:
        reader: Whose answers they are. It is referred to weakly, since it has this: what a cache
            holds is freed with its last reference, not when cycles are looked for.
    """

    def __init__(self, reader: Answered) -> None:
        self._reader = weakref.ref(reader)
        self.buffers: StaticDecoding | RollingDecoding | None = None  # while `generate` decodes
        self.allowed = True  # as far as the generate under way allows
        self.steps = 0  # tokens that `generate` has decoded into buffers so far

    @property
    def reader(self) -> Answered:
        """Whose answers they are."""
        reader = self._reader()
        assert reader is not None
        return reader

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the decoding of an answer."""
        reader = self.reader
        if reader.max_new_tokens is None or not isinstance(reader.storage, PlainStorage):
            return False
        # A state is a tensor of one size, but is copied before every forward; index keys grow, and
        # images are no tokens. What attends to another layer's keys has no buffers of its own.
        fixed = all(type(layer) is PolicyLayer and layer.shows_queries for layer in reader.layers)
        parts, decoding = None, reader.policy.decoding
        if reader.attachment is not None:
            parts = reader.attachment.parts
            # What counts positions itself is told others than those of a step; and what is seen of
            # an answer alone has no mask there.
            fixed = fixed and not any((*parts.temperatures, *parts.answer_windows))
        if decoding is not None:
            # No step tells with what frequencies its key was turned.
            if decoding.needs_rotary and parts is not None:
                fixed = fixed and not changes_with_length(parts.decoder.config)
            fixed = fixed and not self._expands
        return fixed and self.allowed

    @property
    def _expands(self) -> bool:
        """Whether attention makes keys of what layers hold, which no step shows between steps."""
        attachment = self.reader.attachment
        kinds = [] if attachment is None else attachment.parts.kinds
        latent = any(isinstance(kind, LatentAttention) for kind in kinds)
        return latent or any(layer.expands for layer in self.reader.layers)

    def mask_of_step(self, attention_mask: Tensor | None) -> Tensor | None:
        """The mask that `generate` is to give the model at the next forward.

        Args:
            attention_mask: ``[batch, columns]`` of all tokens.

        Returns:
            The same for a prompt. For a token that is decoded, ``[1, 1, 1, 1]`` to hold its place:
            every layer has a mask of its own.

        Raises:
            ValueError: The mask is not one of the tokens seen and another.
        """
        reader = self.reader
        if reader.acts_next:
            return attention_mask
        before, decoding, tokens = self.buffers, reader.placed.decoding, reader.tokens
        assert tokens is not None
        if before is not None and before.steps == before.room:
            due = decoding is not None and tokens.due(decoding.every)
            if not (due and self._choose(before)):
                self.end()
            tokens = reader.tokens
            assert tokens is not None
        if self.buffers is None:
            # From then on nothing but `generate` itself makes masks longer and tokens more.
            if attention_mask is not None:
                check_step(attention_mask, tokens)
            self.buffers = self._begun()
        one = torch.ones(tokens.batch, 1, dtype=torch.bool, device=tokens.valid.device)
        positions, rotary = tokens.positions_of(one), tokens.rotary_positions_of(one)
        tokens = tokens.extended(positions, one, padded=False, acts=False, skipped=None)
        self.buffers.advance(positions, rotary)
        self.steps += 1
        reader.tokens = tokens
        self.buffers.follow(reader.layers, tokens)
        return one[:1, None, None]

    def _begun(self) -> StaticDecoding | RollingDecoding:
        """Buffers of what layers hold, and the model's hooks made to look for them."""
        reader = self.reader
        reader.abandon_forward()
        attachment, tokens, left = reader.attachment, reader.tokens, reader.max_new_tokens
        assert attachment is not None
        assert tokens is not None
        assert left is not None
        assert tokens.rows_since is None  # the turn has begun with an act on all rows
        parts, decoding = attachment.parts, reader.placed.decoding
        if decoding is not None:
            left -= self.steps % left  # the buffers before were for some of them
        how = reader.layers, tokens, parts.windows, parts.implementation, left
        rolling = None if decoding is None else RollingDecoding.of(*how, decoding)
        buffers = rolling or StaticDecoding.of(*how, decoding)
        layers = [BeforeLayer.of(index, layer) for index, layer in enumerate(parts.layers)]
        observes = decoding is not None and decoding.num_queries != 0
        attachment.decode(before_decoder, layers, observes=observes)
        return buffers

    def _choose(self, buffers: StaticDecoding | RollingDecoding) -> bool:
        """Let layers choose between two steps; whether the next goes into the same buffers."""
        layers, tokens = self.reader.layers, self.reader.tokens
        assert tokens is not None
        if isinstance(buffers, RollingDecoding):
            goes_on = buffers.choose()
            self.reader.tokens = tokens.settled()
            return goes_on
        assert buffers.choice is not None
        buffers.read_queries(layers, tokens.seen)
        self._take(buffers.choice)
        buffers.rests = True
        assert self.reader.tokens is not None
        return buffers.go_on(layers, self.reader.tokens)

    def copied(self, layers: list[PolicyLayer], tokens: SeenTokens) -> SeenTokens:
        """Let copies of the layers hold what goes on outside of the buffers.

        That is without a token that not every layer has written, and with the choice that was to be
        made before the next one.

        Args:
            layers: The copies.
            tokens: Those seen.

        Returns:
            Those that the copies have seen.
        """
        buffers, attachment = self.buffers, self.reader.attachment
        if buffers is None:
            return tokens
        assert attachment is not None
        decoding, parts = self.reader.placed.decoding, attachment.parts
        if decoding is not None:
            for layer in layers:
                layer.own()  # what is bounded is written over
        count = 0 if buffers.rests else buffers.unwritten()
        if count:
            tokens = tokens.without_last(count)
            for layer in layers:
                layer.drop_last(count)
                layer.follow(tokens)
        if decoding is None or not tokens.due(decoding.every):
            return tokens
        choice = StaticChoice(decoding, parts.windows, parts.implementation, [])
        for layer, own in zip(layers, self.reader.layers, strict=True):
            layer.projection = own.projection
        choice.choose(layers, tokens)
        choice.take()
        tokens = tokens.settled()
        for layer in layers:
            layer.projection = None  # a copy is bound to no model
            layer.follow(tokens)
        return tokens

    def _take(self, choice: StaticChoice) -> None:
        """Let layers choose, and hold what they keep."""
        assert self.reader.tokens is not None
        choice.check_shown(self.reader.layers)
        choice.choose(self.reader.layers, self.reader.tokens)
        self._settle(choice)

    def _settle(self, choice: StaticChoice) -> None:
        """Hold what was chosen."""
        choice.take()
        assert self.reader.tokens is not None
        self.reader.tokens = self.reader.tokens.settled()
        for layer in self.reader.layers:
            layer.follow(self.reader.tokens)

    def read_queries(self) -> None:
        """Let layers remember the queries that are in the buffers."""
        buffers, tokens = self.buffers, self.reader.tokens
        if buffers is not None and tokens is not None and not buffers.rests:
            buffers.read_queries(self.reader.layers, tokens.seen)

    def end(self, *, failed: bool = False) -> None:
        """Go on with buffers that grow; take back a token that not every layer has written.

        Args:
            failed: Whether something failed, perhaps behind the layers, where nothing tells of it:
                then the last token is taken back in any case. It can be read again.
        """
        buffers, self.buffers = self.buffers, None
        if buffers is None:
            return
        assert self.reader.attachment is not None
        self.reader.attachment.attach()
        if isinstance(buffers, RollingDecoding):
            self._end_rolling(buffers, failed=failed)
            return
        layers, tokens, choice = self.reader.layers, self.reader.tokens, buffers.choice
        assert tokens is not None
        if choice is not None and choice.pending:  # it was interrupted in between
            self._settle(choice)
            return
        for layer in layers:
            layer.release()
        if buffers.rests:
            return
        count = max(buffers.unwritten(), int(failed and buffers.steps > 0))
        buffers.read_queries(layers, tokens.seen)
        if count:
            self.reader.tokens = tokens = tokens.without_last(count)
            for layer in layers:
                layer.drop_last(count)
                layer.follow(tokens)
        if choice is not None and tokens.due(choice.decoding.every):
            self._take(choice)

    def _end_rolling(self, rolling: RollingDecoding, *, failed: bool) -> None:
        tokens = self.reader.tokens
        assert tokens is not None
        taken_back = rolling.unwritten() or (failed and rolling.steps)
        if taken_back:
            rolling.places.forget(tokens.lengths - 1)
            tokens = tokens.without_last(1)
        elif tokens.appended.shape[1]:
            rolling.choose()
            tokens = tokens.settled()
        self.reader.tokens = tokens
        rolling.follow(self.reader.layers, tokens)
        rolling.read_queries(self.reader.layers, tokens.seen)
        for layer in self.reader.layers:
            layer.own()
            if taken_back:
                layer.observed = Observed()
