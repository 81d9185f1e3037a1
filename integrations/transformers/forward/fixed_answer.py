"""Begin, continue and end the decoding of an answer into buffers of a fixed size.

With ``max_new_tokens`` every layer reserves memory for the answer when it reads the prompt. At the
first decoded token of a greedy or sampled `generate`, the hooks on the model are replaced by two
(`BeforeLayer` and `before_decoder`) that find the cache in the call, so that the code compiled with
one cache serves all caches. A compiled step reads only buffers, a counter and a mask.

`generate` asks for a mask before every token. At that moment, between two steps of which any part
may be compiled, the token is counted. When the answer ends, the
counters say which slots were written.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.inputs import check_step
from kvpolicy.integrations.transformers.forward.read_state import ReadState
from kvpolicy.integrations.transformers.forward.static_decoding import (
    BeforeLayer,
    StaticDecoding,
    before_decoder,
)
from kvpolicy.integrations.transformers.model.attachment import Attachment
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
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
        self.buffers: StaticDecoding | None = None  # while `generate` decodes
        self.allowed = True  # whether the current `generate` allows it
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
        # Excluded are layers that evict while they decode; states, which are copied before every
        # forward; index keys, which grow; images, which are not tokens; and layers that use another
        # layer's keys, which have no buffers.
        fixed = reader.policy.decoding is None and all(
            type(layer) is PolicyLayer and layer.facts.shows_queries for layer in reader.layers
        )
        if reader.attachment is not None:
            # Attention that counts positions itself would count wrong ones in a step.
            fixed = fixed and not any(reader.attachment.parts.temperatures)
        return fixed and self.allowed

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
        if self.buffers is not None and self.buffers.steps == self.buffers.room:
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
        reader.tokens = tokens
        self.buffers.follow(reader.layers, tokens)
        return one[:1, None, None]

    def _begun(self) -> StaticDecoding:
        """Make fixed buffers from the layers, and give the model the hooks for decoding."""
        reader = self.reader
        reader.abandon_forward()
        attachment, tokens, room = reader.attachment, reader.tokens, reader.max_new_tokens
        assert attachment is not None
        assert tokens is not None
        assert room is not None
        assert tokens.rows_since is None  # the turn began in all rows
        parts = attachment.parts
        how = tokens, parts.windows, parts.implementation, room
        buffers = StaticDecoding.of(reader.layers, *how)
        layers = [BeforeLayer.of(index, layer) for index, layer in enumerate(parts.layers)]
        attachment.decode(before_decoder, layers)
        return buffers

    def copied(self, layers: list[PolicyLayer], tokens: SeenTokens) -> SeenTokens:
        """Remove a token that not every layer has written from copies made between two steps.

        Args:
            layers: The copies.
            tokens: The tokens seen.

        Returns:
            The tokens that the copies have seen.
        """
        count = 0 if self.buffers is None else self.buffers.unwritten()
        if count:
            tokens = tokens.without_last(count)
            for layer in layers:
                layer.drop_last(count)
                layer.follow(tokens)
        return tokens

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
        layers, tokens = self.reader.layers, self.reader.tokens
        assert tokens is not None
        for layer in layers:
            layer.release()
        count = max(buffers.unwritten(), int(failed and buffers.steps > 0))
        if count:
            self.reader.tokens = tokens = tokens.without_last(count)
            for layer in layers:
                layer.drop_last(count)
                layer.follow(tokens)
