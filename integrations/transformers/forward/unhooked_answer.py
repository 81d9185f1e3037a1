"""Decode an answer without hooks on the layers, if no step needs the policy.

The first token of an answer runs with all hooks. If it turns out that they changed nothing (no
padding, no mask, no window that moves), they are removed until the answer ends, or until layers
evict: layers then hand out what they hold, as a cache of Transformers does. One hook remains, on
the model, which notes ids. Which tokens were read is worked out when somebody asks, or at the end,
from the number of slots that layers have written.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import CacheInUseError
from kvpolicy.integrations.transformers.forward.attending import LayerAttention
from kvpolicy.integrations.transformers.forward.decoding.bounded import Bound
from kvpolicy.integrations.transformers.forward.fixed_answer import Answered
from kvpolicy.integrations.transformers.forward.growing_keys import (
    Growing,
    GrowingHeads,
    GrowingKeys,
    QueryLog,
)
from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.integrations.transformers.forward.passes import Ignore, KeyUse
from kvpolicy.integrations.transformers.model.attachment import carries
from kvpolicy.integrations.transformers.model.routing import Attend, own_function, replaced
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.storage import Plain
from kvpolicy.integrations.transformers.state.tokens import SeenTokens

# Between two choices of a bounded answer there must be so many tokens that hooks are removed.
FEWEST_TOKENS = 8


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
        self.layers: list[Growing] | None = None
        self.most: int | None = None
        self._may_begin = False
        self._logs: list[QueryLog] = []  # one of each layer, if the answer is bounded by queries
        self._end: int | None = None  # number of columns seen when hooks are needed again
        self._thread = threading.current_thread()  # the one that decodes
        self._ids: dict[int, Tensor] = {}  # by column, of tokens that are not yet recorded
        self._removed = ExitStack()  # what is removed from the model at the end

    @property
    def _cache(self) -> Answered:
        reader = self._reader()
        assert reader is not None
        return reader

    def look(self, run: PassRun, given: dict[str, Any]) -> None:
        """Find out from an answer's first token whether the next ones need hooks.

        Args:
            run: The pass of a forward, which has ended.
            given: The arguments with which the model called its decoder, by name.
        """
        if self.most is not None and run.made.keys is KeyUse.APPEND and run.at.reach.count == 1:
            self._may_begin = needs_no_hooks(run, given, self.most)
            evicted = not run.tokens.appended.shape[1]  # layers may hold padding afterwards
            if not (self._may_begin or evicted):
                self.most = None  # later tokens need hooks too

    def begin(self) -> None:
        """Remove the hooks if `look` has found that the next tokens do not need them."""
        may, self._may_begin = self._may_begin, False
        tokens, cache = self._cache.now.tokens, self._cache
        if not may or self.most is None or tokens is None or cache.attachment is None:
            return
        parts, outer = cache.attachment.parts, cache.attachment.outer
        decoding, room = cache.placed.decoding, self.most
        self._end = None
        if decoding is not None:  # layers evict when one more token has come, which takes hooks
            self._end = tokens.seen + decoding.every - tokens.appended.shape[1] - 1
            room = min(room, self._end - tokens.seen)
            if room <= 0:
                return
        self._thread = threading.current_thread()
        self.layers = [
            self._growing(layer, module, room, tokens.seen)
            for layer, module in zip(cache.layers, parts.attentions, strict=True)
        ]
        asked = 0 if decoding is None else decoding.num_queries
        for layer, each, module in zip(cache.layers, self.layers, parts.attentions, strict=True):
            layer.behind = self.settle
            attend: Attend | None = None
            if isinstance(each, GrowingHeads):
                layer.contents = attrs.evolve(layer.contents, held=None)  # not held twice
                attend = each.attend
            if asked != 0:
                self._logs.append(QueryLog(each, attend or own_function(module), asked))
                attend = self._logs[-1].attend
            if attend is not None:
                self._removed.enter_context(replaced(module, attend))
        cache.attachment.detach()
        hooks: list[tuple[Any, Any]] = [(each, self._before_model) for each in outer]
        if tokens.skipped is not None:
            hooks.append((parts.decoder, self._move_positions))
        for module, hook in hooks:
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            self._removed.callback(handle.remove)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Answered | None:
        """Return the dispatcher of the cache if a call carries this cache; else None.

        Torch may call a hook that was just removed, for a call in another thread. The cache may be
        gone by then.
        """
        cache = self._reader()
        attached = None if cache is None else cache.attachment
        return None if attached is None or not carries(attached.cache, args, kwargs) else cache

    def _before_model(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Hook of the model: record the token's ids; restore all hooks if layers evict next."""
        cache = self._called(args, kwargs)
        if cache is None or kwargs is None:
            return
        assert cache.attachment is not None
        if self._end is not None and cache.seen >= self._end:
            self.end()
            cache.attachment.before_model(module, args, kwargs)
        elif isinstance(ids := kwargs.get("input_ids"), Tensor) and ids.shape[1:] == (1,):
            self._ids[cache.seen] = ids

    def _move_positions(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hook of the decoder: do not count tokens in positions that a restart has left out."""
        cache = self._called(args, kwargs)
        if cache is None or kwargs is None:
            return None
        assert cache.now.tokens is not None
        return args, moved_positions(kwargs, cache.now.tokens)

    @staticmethod
    def _growing(layer: PolicyLayer, module: Any, most: int, seen: int) -> Growing:
        """Wrap a layer's keys and values to append up to ``most`` tokens after ``seen``."""
        held = layer.contents.held
        if layer.contents.padded:
            return GrowingHeads(layer, module)
        assert isinstance(held, Plain)
        # With this room the layer takes no more memory than it would without a policy.
        return GrowingKeys(held, min(most, seen - held.length))

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
        """Update the layers and the record of seen tokens by the tokens written since.

        A token that not every layer has written yet does not count.

        Args:
            drops_last: Whether the last token does not count either.

        Raises:
            CacheInUseError: Another thread decodes, and may be writing.
        """
        layers, cache = self.layers, self._cache
        if layers is None:
            return
        if self._thread is not threading.current_thread():
            raise CacheInUseError.by(self._thread)
        ahead = [each.length - each.start for each in layers]
        count = min(ahead) - int(drops_last and max(ahead) == min(ahead))
        tokens = cache.now.tokens
        lent = any(layer.contents.held is None for layer in cache.layers)
        if tokens is None or (count <= 0 and not lent):
            return
        count = max(count, 0)
        for layer, each in zip(cache.layers, layers, strict=True):
            each.give(layer, each.start + count)
        columns = torch.ones(tokens.batch, count, dtype=torch.bool, device=tokens.valid.device)
        tokens = tokens.extended(
            tokens.positions_of(columns),
            columns,
            ids=self._ids_behind(tokens, count),
            padded=False,
            acts=False,
            skipped=None,
        )
        cache.take_tokens(tokens)
        for layer, log in zip(cache.layers, self._logs, strict=False):
            log.give(layer, count, tokens)

    def _ids_behind(self, tokens: SeenTokens, count: int) -> Tensor:
        """Return and forget the ids of the next ``count`` tokens, -1 if unknown."""
        unknown = torch.full((tokens.batch, 1), -1, device=tokens.valid.device)
        ids = [self._ids.pop(tokens.seen + index, unknown) for index in range(count)]
        return torch.cat(ids, dim=1) if ids else unknown[:, :0]

    def end(self, *, failed: bool = False) -> None:
        """Register the hooks again; forget a last token that not every layer has written.

        Args:
            failed: Whether something failed. A failure behind the layers leaves no trace, so the
                last token is forgotten in any case; it can be read again.
        """
        self._may_begin = False
        if self.layers is None:
            return
        self.settle(drops_last=failed)
        self.layers, self._logs, self._ids = None, [], {}
        self._removed.close()
        for layer in self._cache.layers:
            layer.behind = None
        assert self._cache.attachment is not None
        self._cache.attachment.attach()


def needs_no_hooks(run: PassRun, given: dict[str, Any], most: int) -> bool:
    """True if the tokens after this decoded token can be read without hooks on the model.

    Args:
        run: The pass that has read the token.
        given: The arguments with which the model called its decoder, by name.
        most: The largest number of tokens to come.
    """
    call, at, made = run.call, run.at, run.made
    model, end = call.model, at.before.seen + most
    return (
        _waits_for_queries(run)
        and not (call.own_masks or at.reach.padded)
        and call.attended is None
        and call.implementation == "sdpa"
        and not any(model.temperatures)
        and all(window is None or window >= end for window in model.windows)
        and all(_grows_alone(index, layer, run.attention) for index, layer in enumerate(at.layers))
        and _same_arguments(moved_positions(given, at.before), made.incoming.arguments)
    )


def _waits_for_queries(run: PassRun) -> bool:
    """True if a token's queries are at most stored, for a later eviction."""
    decoding = run.call.model.policy.decoding
    if type(run.made.at_queries) is Ignore:
        return True
    alike = type(run.made.at_queries) is Bound and run.tokens.rows_since is None
    if not alike or decoding is None or decoding.every < FEWEST_TOKENS:
        return False
    seen = run.attention.own_keys
    return decoding.num_queries == 0 or all(index in seen for index in range(len(run.at.layers)))


def _grows_alone(index: int, layer: PolicyLayer, attention: LayerAttention) -> bool:
    """True if a layer only has to append a token to what it holds."""
    contents = layer.contents
    if not layer.plain or not layer.facts.shows_queries or contents.held is None:
        return False
    if contents.padded:  # on other devices the calls for every head take longer than a mask
        on_cpu = contents.chosen is not None and contents.chosen.device.type == "cpu"
        return index in attention.plain and on_cpu and not layer.one_choice
    return isinstance(contents.held, Plain) and index not in attention.told_or_masked


def moved_positions(arguments: dict[str, Any], tokens: SeenTokens) -> dict[str, Any]:
    """Return a decoder's arguments with positions that do not count tokens left out by a restart.

    Args:
        arguments: By name.
        tokens: The tokens seen before.
    """
    given = arguments.get("position_ids")
    if tokens.skipped is None or given is None:
        return arguments
    moved = (given - tokens.skipped[:, None]).clamp(min=0)
    return {**arguments, "position_ids": moved}


def _same_arguments(given: dict[str, Any], used: dict[str, Any]) -> bool:
    if given.keys() != used.keys():
        return False
    return all(used[name] is value or _equal(used[name], value) for name, value in given.items())


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
