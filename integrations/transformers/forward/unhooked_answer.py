"""Decode an answer without hooks on the model, where a token needs nothing of the library.

The first token of an answer runs with all hooks. If it turns out that they changed nothing (no
padding, no bound, no mask, no position), they are removed until the answer ends: layers then hand
out what they hold, as a cache of Transformers does. Which tokens were read is worked out when
somebody asks, or at the end, from the number of slots that layers have written.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.integrations.transformers.forward.passes import Ignore, KeyUse
from kvpolicy.integrations.transformers.forward.read_state import ReadState
from kvpolicy.integrations.transformers.model.attachment import Attachment
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.storage import COPIED_BYTES, Plain
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


class Answered(Protocol):
    """A protocol for the state of a cache that changes while an answer is decoded."""

    layers: list[PolicyLayer]
    attachment: Attachment | None
    now: ReadState

    def take_tokens(self, tokens: SeenTokens) -> None:
        """Replace the record of the tokens seen, in the dispatcher and in all layers."""


class GrowingKeys:
    """The keys and values of one layer, to which its attention module appends tokens directly.

    What was there before a token is not remembered, so that its memory, which the processor has at
    hand, is used again.

    Args:
        held: What the layer holds.

    Attributes:
        start: Number of slots of which the layer's own record knows.
    """

    def __init__(self, held: Plain) -> None:
        self._held = held
        # All slots, as long as they are so few that all are copied with each token.
        self._few: tuple[Tensor, Tensor] | None = None
        if held.is_full and not held.grows_in_place:
            self._few = held.read()
        self.start = held.shape[2]

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens; return all keys and values."""
        few = self._few
        if few is None:
            self._held = self._held.appended(keys, values)
            return self._held.read()
        self._few = few = torch.cat([few[0], keys], dim=2), torch.cat([few[1], values], dim=2)
        if few[0].nbytes > COPIED_BYTES:
            self._held, self._few = self.held, None
        return few

    @property
    def held(self) -> Plain:
        """What the layer holds with the tokens appended so far."""
        return self._held if self._few is None else Plain.of(*self._few, self._held.device)

    @property
    def length(self) -> int:
        """The number of slots."""
        return self._held.length if self._few is None else self._few[0].shape[2]


class UnhookedAnswer:
    """A manager of the answers that `generate` decodes without hooks on the model.

    Args:
        reader: The dispatcher of the cache. The reference is weak, since the dispatcher refers to
            this object.

    Attributes:
        layers: The growing keys of each layer; None while hooks run.
        most: The largest number of tokens that the current answer may still get; None if a token
            must be decoded with hooks.
    """

    def __init__(self, reader: Answered) -> None:
        self._reader = weakref.ref(reader)
        self.layers: list[GrowingKeys] | None = None
        self.most: int | None = None
        self._may_begin = False

    @property
    def _cache(self) -> Answered:
        reader = self._reader()
        assert reader is not None
        return reader

    def look(self, run: PassRun, given: dict[str, Any]) -> None:
        """Find out from the first token of an answer if hooks are needed for the next ones.

        Args:
            run: The pass of a forward, which has ended.
            given: The arguments with which the model called its decoder, by name.
        """
        if self.most is not None and run.made.keys is KeyUse.APPEND and run.at.reach.count == 1:
            self._may_begin = needs_no_hooks(run, given, self.most)
            if not self._may_begin:
                self.most = None  # nor do the next ones

    def begin(self) -> None:
        """Remove the hooks, if `look` has found that the next tokens do not need them."""
        may, self._may_begin = self._may_begin, False
        tokens, cache = self._cache.now.tokens, self._cache
        if not may or self.most is None or tokens is None or cache.attachment is None:
            return
        self.layers = []
        for layer in cache.layers:
            held = layer.contents.held
            assert isinstance(held, Plain)
            # With this room the layer takes no more memory than it would without a policy.
            room = min(self.most, tokens.seen - held.length)
            held = held.with_room(room) if held.grows_in_place and room > 0 else held
            self.layers.append(GrowingKeys(held))
            layer.behind = self.settle
        cache.attachment.detach()

    def seen_since(self, index: int) -> int:
        """Return the number of tokens that a layer has written since the last record of tokens."""
        layer = None if self.layers is None else self.layers[index]
        return 0 if layer is None else layer.length - layer.start

    def mask_sizes(self, query_len: int, index: int, seen: int) -> tuple[int, int]:
        """Return the key length and key offset of a layer's next mask.

        Args:
            query_len: Number of the new tokens.
            index: Index of the layer.
            seen: Number of columns seen.
        """
        assert self.layers is not None
        kept = self.layers[index].length
        return kept + query_len, seen - kept

    def settle(self, *, drops_last: bool = False) -> None:
        """Bring the layers' contents and the tokens seen up to date with what was written.

        A token that not every layer has written yet does not count.

        Args:
            drops_last: Whether the last token does not count either.
        """
        layers, cache = self.layers, self._cache
        if layers is None:
            return
        ahead = [each.length - each.start for each in layers]
        count = min(ahead) - int(drops_last and max(ahead) == min(ahead))
        tokens = cache.now.tokens
        if count <= 0 or tokens is None:
            return
        for layer, each in zip(cache.layers, layers, strict=True):
            length = each.start + count
            held = each.held if each.length == length else each.held.first(length)
            each.start = length
            layer.contents = attrs.evolve(layer.contents, held=held)
        columns = torch.ones(tokens.batch, count, dtype=torch.bool, device=tokens.valid.device)
        positions = tokens.positions_of(columns)
        cache.take_tokens(
            tokens.extended(positions, columns, padded=False, acts=False, skipped=None)
        )

    def end(self, *, failed: bool = False) -> None:
        """Register the hooks again; a token that not every layer has written is forgotten.

        Args:
            failed: Whether something failed. A failure behind the layers leaves no trace, so the
                last token is forgotten in any case; it can be read again.
        """
        self._may_begin = False
        if self.layers is None:
            return
        self.settle(drops_last=failed)
        self.layers = None
        for layer in self._cache.layers:
            layer.behind = None
        assert self._cache.attachment is not None
        self._cache.attachment.attach()


def needs_no_hooks(run: PassRun, given: dict[str, Any], most: int) -> bool:
    """True if the tokens after a decoded token can be read without hooks on the model.

    Args:
        run: The pass that has read the token.
        given: The arguments with which the model called its decoder, by name.
        most: The largest number of tokens to come.
    """
    call, at, made = run.call, run.at, run.made
    model, end = call.model, at.before.seen + most
    return (
        type(made.at_queries) is Ignore
        and run.attention.is_free
        and not (call.own_masks or at.reach.padded)
        and call.attended is None
        and call.implementation == "sdpa"
        and at.tokens.skipped is None
        and not any(model.temperatures)
        and all(window is None or window >= end for window in model.windows)
        and all(map(_grows_alone, at.layers))
        and _same_arguments(given, made.incoming.arguments)
    )


def _grows_alone(layer: PolicyLayer) -> bool:
    """True if all that a layer needs for a token is to append it to what it holds."""
    contents = layer.contents
    plain = type(layer) is PolicyLayer and layer.facts.shows_queries
    return plain and isinstance(contents.held, Plain) and not contents.padded


def _same_arguments(given: dict[str, Any], used: dict[str, Any]) -> bool:
    if given.keys() != used.keys():
        return False
    return all(used[name] is value or _equal(used[name], value) for name, value in given.items())


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
