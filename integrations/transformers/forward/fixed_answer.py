"""Begin, continue and end the decoding of an answer into buffers of a fixed size.

With ``max_new_tokens`` every layer reserves memory for the answer when it reads the prompt. At the
first decoded token of a greedy or sampled `generate`, the hooks on the model are replaced by two
(`BeforeLayer` and `before_decoder`) that find the cache in the call, so that the code compiled with
one cache serves all caches. A compiled step reads only buffers, a counter and a mask.

`generate` asks for a mask before every token. At that moment, between two steps of which any part
may be compiled, the token is counted and layers choose what they keep. When the answer ends, the
counters say which slots were written.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.decoding.static_choosing import StaticChoice
from kvpolicy.integrations.transformers.forward.decoding.static_rolling import RollingDecoding
from kvpolicy.integrations.transformers.forward.inputs import check_step
from kvpolicy.integrations.transformers.forward.read_state import ReadState
from kvpolicy.integrations.transformers.forward.static_decoding import (
    BeforeLayer,
    StaticDecoding,
    before_decoder,
)
from kvpolicy.integrations.transformers.model.attachment import Attachment
from kvpolicy.integrations.transformers.model.kinds import LatentAttention
from kvpolicy.integrations.transformers.model.rotary import changes_with_length
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.recent_queries import RecentQueries
from kvpolicy.integrations.transformers.state.storage import PlainStorage, Storage
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy


class Answered(Protocol):
    """A protocol for the parts of a cache's state that change while an answer is decoded."""

    policy: CachePolicy
    storage: Storage
    max_new_tokens: int | None
    layers: list[PolicyLayer]
    attachment: Attachment | None
    now: ReadState

    @property
    def tokens(self) -> SeenTokens | None:
        """The record of the tokens that the cache has read; None if it has read none."""

    @tokens.setter
    def tokens(self, tokens: SeenTokens | None) -> None: ...

    @property
    def seen(self) -> int:
        """The number of columns seen, padding included."""

    @property
    def placed(self) -> CachePolicy:
        """The policy, with its unset layer indices chosen for the attached model."""

    @property
    def acts_next(self) -> bool:
        """True if the policy acts on the next forward, which is then no decoding step."""

    def abandon_forward(self) -> None:
        """Undo a call of the model that did not finish."""

    def take_tokens(self, tokens: SeenTokens) -> None:
        """Replace the record of the tokens seen, in the dispatcher and in all layers."""


class FixedAnswer:
    """A manager of the fixed-size buffers into which a cache's answers are decoded.

    Args:
        reader: The reader of the cache. The reference is weak, since the reader refers to this
            object: without a cycle, a cache is freed with its last reference, and not only by
            garbage collection.
    """

    def __init__(self, reader: Answered) -> None:
        self._reader = weakref.ref(reader)
        self.buffers: StaticDecoding | RollingDecoding | None = None  # while `generate` decodes
        self.allowed = True  # whether the current `generate` allows it
        self.steps = 0  # tokens that `generate` has decoded into buffers so far
        # ``[batch, 1]``, of the token that `generate` reads next; None if it has not said so.
        self.next_ids: Tensor | None = None

    @property
    def reader(self) -> Answered:
        """The dispatcher of the cache whose answers are decoded."""
        reader = self._reader()
        assert reader is not None
        return reader

    @property
    def is_compileable(self) -> bool:
        """True if `generate` may compile the decoding of an answer."""
        reader = self.reader
        if reader.max_new_tokens is None or not isinstance(reader.storage, PlainStorage):
            return False
        # Excluded are states, which are copied before every forward; index keys, which grow;
        # images, which are not tokens; and layers that use another layer's keys, which have no
        # buffers.
        fixed = all(layer.plain and layer.facts.shows_queries for layer in reader.layers)
        parts, decoding = None, reader.policy.decoding
        if reader.attachment is not None:
            parts = reader.attachment.parts
            # Attention that counts positions itself would count wrong ones in a step.
            fixed = fixed and not any(parts.temperatures)
        if decoding is not None:
            # A step does not report the frequencies by which its key was rotated.
            if decoding.needs_rotary and parts is not None:
                fixed = fixed and not changes_with_length(parts.decoder.config)
            fixed = fixed and not self._expands
        return fixed and self.allowed

    @property
    def _expands(self) -> bool:
        """True if a layer's attention computes its keys from other tensors in the cache (MLA).

        Between two steps these keys are not available.
        """
        attachment = self.reader.attachment
        kinds = [] if attachment is None else attachment.parts.kinds
        latent = any(isinstance(kind, LatentAttention) for kind in kinds)
        return latent or any(layer.facts.expands for layer in self.reader.layers)

    def mask_of_step(self, attention_mask: Tensor | None) -> Tensor | None:
        """Return the attention mask that `generate` must give the model in the next forward.

        Args:
            attention_mask: ``[batch, columns]``, the mask of all tokens.

        Returns:
            For a prompt, the same mask. For a decoded token, a placeholder ``[1, 1, 1, 1]``, since
            every layer has a mask of its own.

        Raises:
            ValueError: The mask does not fit the tokens seen and one more.
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
            # From then on only `generate` itself makes the mask longer and adds tokens.
            if attention_mask is not None:
                check_step(attention_mask, tokens)
            self.buffers = self._begun()
        one = torch.ones(tokens.batch, 1, dtype=torch.bool, device=tokens.valid.device)
        positions, rotary = tokens.positions_of(one), tokens.rotary_positions_of(one)
        ids = None if self.next_ids is None else self.next_ids.to(one.device)
        tokens = tokens.extended(positions, one, ids=ids, padded=False, acts=False, skipped=None)
        self.buffers.advance(positions, rotary)
        self.steps += 1
        reader.tokens = tokens
        self.buffers.follow(reader.layers, tokens)
        return one[:1, None, None]

    def _begun(self) -> StaticDecoding | RollingDecoding:
        """Make fixed buffers from the layers, and give the model the hooks for decoding."""
        reader = self.reader
        reader.abandon_forward()
        attachment, tokens, left = reader.attachment, reader.tokens, reader.max_new_tokens
        assert attachment is not None
        assert tokens is not None
        assert left is not None
        assert tokens.rows_since is None  # the turn began in all rows
        parts, decoding = attachment.parts, reader.placed.decoding
        if decoding is not None:
            left -= self.steps % left  # earlier buffers took some of them
        how = reader.layers, tokens, parts.windows, parts.implementation, left
        rolling = None if decoding is None else RollingDecoding.of(*how, decoding)
        buffers = rolling or StaticDecoding.of(*how, decoding)
        layers = [BeforeLayer.of(index, layer) for index, layer in enumerate(parts.layers)]
        observes = decoding is not None and decoding.num_queries != 0
        attachment.decode(before_decoder, layers, observes=observes)
        return buffers

    def _choose(self, buffers: StaticDecoding | RollingDecoding) -> bool:
        """Let layers evict between two decoding steps; return True if the buffers remain in use."""
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
        """Complete the pending eviction in copies of the layers that are made between two steps.

        The copies lose a token that not every layer has written, and make the choice that was due
        before the next token.

        Args:
            layers: The copies.
            tokens: The tokens seen.

        Returns:
            The tokens that the copies have seen.
        """
        buffers, attachment = self.buffers, self.reader.attachment
        if buffers is None:
            return tokens
        assert attachment is not None
        decoding, parts = self.reader.placed.decoding, attachment.parts
        if decoding is not None:
            for layer in layers:
                layer.own()  # buffers of a bounded answer are overwritten
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
            layer.facts.projection = own.facts.projection
        choice.choose(layers, tokens)
        choice.take()
        tokens = tokens.settled()
        for layer in layers:
            layer.facts.projection = None  # a copy is not bound to a model
            layer.follow(tokens)
        return tokens

    def _take(self, choice: StaticChoice) -> None:
        """Let layers choose the tokens to keep, and store their choices."""
        assert self.reader.tokens is not None
        choice.check_shown(self.reader.layers)
        choice.choose(self.reader.layers, self.reader.tokens)
        self._settle(choice)

    def _settle(self, choice: StaticChoice) -> None:
        """Store the choices of the layers, and update the record of seen tokens."""
        choice.take()
        assert self.reader.tokens is not None
        self.reader.tokens = self.reader.tokens.settled()
        for layer in self.reader.layers:
            layer.follow(self.reader.tokens)

    def read_queries(self) -> None:
        """Copy the queries in the fixed buffers to the layers of the cache."""
        buffers, tokens = self.buffers, self.reader.tokens
        if buffers is not None and tokens is not None and not buffers.rests:
            buffers.read_queries(self.reader.layers, tokens.seen)

    def end(self, *, failed: bool = False) -> None:
        """End decoding into fixed buffers; remove a last token that not every layer has written.

        Args:
            failed: Whether something failed. A failure behind the layers leaves no trace, so the
                last token is removed in any case. It can be read again.
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
        if choice is not None and choice.pending:  # a choice was interrupted
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
                layer.observed = RecentQueries()
