"""Let Transformers' own layers hold the keys of an answer, so that its tokens need no hooks.

The first token of an answer runs with all hooks. If it turns out that they changed nothing (no
mask, no window that moves, no layer that evicts), each layer's keys are lent to a `DynamicLayer` of
Transformers, and the hooks are removed until the answer ends. With ``max_new_tokens`` the keys are
lent to `StaticLayer`s before the first token (`StaticSteps`), and `generate` may compile the steps.

Which tokens were read is worked out when somebody asks, or at the end, from the number of slots
that the layers have written. `generate` reports their ids to `note_ids`.
"""

import threading
import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvpolicy.errors import CacheInUseError
from kvpolicy.integrations.transformers.forward.attending import LayerAttention
from kvpolicy.integrations.transformers.forward.inputs import check_step
from kvpolicy.integrations.transformers.forward.lent_layers import Lent, LentHeads, LentKeys
from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.integrations.transformers.forward.passes import AtQueries, KeyUse
from kvpolicy.integrations.transformers.forward.static_steps import StaticSteps
from kvpolicy.integrations.transformers.model.attachment import carries
from kvpolicy.integrations.transformers.model.routing import replaced
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.storage import Plain, PlainStorage
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


class LentAnswer:
    """A manager of the answers whose keys Transformers' own layers hold.

    Args:
        reader: The `ForwardDispatcher` of the cache, whose file imports this one. The reference is
            weak, since the dispatcher refers to this object: without a cycle, a cache is freed with
            its last reference.

    Attributes:
        cache: The cache of Transformers that holds the keys of an answer; None between answers.
        static: The steps that may be compiled; None if the layers are no `StaticLayer`s.
        may_be_static: Whether the current `generate` allows fixed buffers.
        most: The largest number of tokens that the current answer may still get; None if a token
            must be decoded with hooks.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = weakref.ref(reader)
        self.cache: Cache | None = None
        self.static: StaticSteps | None = None
        self.may_be_static = True
        self.most: int | None = None
        self._may_begin = False
        self._lent: list[Lent] = []
        self._given = False  # whether the cache's layers hold the keys, too
        self._thread = threading.current_thread()  # the one that decodes
        self._ids: dict[int, Tensor] = {}  # by column, of tokens that are not yet recorded
        self._removed = ExitStack()  # what is removed from the model at the end

    @property
    def _of(self) -> Any:
        reader = self._reader()
        assert reader is not None
        return reader

    @property
    def is_compileable(self) -> bool:
        """True if `generate` may compile the decoding of an answer."""
        reader = self._of
        if reader.max_new_tokens is None or not isinstance(reader.storage, PlainStorage):
            return False
        # Excluded are layers that evict while they decode; states, which are copied before every
        # forward; index keys, which grow; images, which are not tokens; and layers that use another
        # layer's keys, which have no buffers.
        fixed = reader.policy.decoding is None and all(
            layer.plain and layer.facts.shows_queries for layer in reader.layers
        )
        if reader.attachment is not None:
            # Attention that counts positions itself would count wrong ones in a step.
            fixed = fixed and not any(reader.attachment.parts.temperatures)
        return fixed and self.may_be_static

    def look(self, run: PassRun, given: dict[str, Any]) -> None:
        """Find out from an answer's first token whether the next ones need hooks."""
        if (
            self.most is not None
            and run.made.at_queries.keys is KeyUse.APPEND
            and run.at.reach.count == 1
        ):
            self._may_begin = needs_no_hooks(run, given, self.most)
            self.most = self.most if self._may_begin else None  # later tokens need hooks too

    def begin(self) -> None:
        """Lend the keys to layers that grow, if `look` has found that no token needs hooks."""
        may, self._may_begin = self._may_begin, False
        tokens, reader = self._of.now.tokens, self._of
        if not may or self.most is None or tokens is None or reader.attachment is None:
            return
        parts, cache = reader.attachment.parts, reader.attachment.cache
        lent: list[Lent] = []
        for layer, module in zip(reader.layers, parts.attentions, strict=True):
            if layer.contents.padded and module is not None:
                lent.append(heads := LentHeads(layer, module))
                self._removed.enter_context(replaced(module, heads.attend))
            else:
                lent.append(LentKeys(layer))
        own = self._lend(lent)
        # A token then runs no code of ours in a layer.
        vars(cache)["update"] = own.update
        self._removed.callback(vars(cache).pop, "update", None)
        reader.attachment.detach()
        if tokens.skipped is not None:
            handle = parts.decoder.register_forward_pre_hook(self._move_positions, with_kwargs=True)
            self._removed.callback(handle.remove)

    def _lend(self, lent: list[Lent]) -> Cache:
        self._thread, self._lent = threading.current_thread(), lent
        for layer in self._of.layers:
            layer.behind = self.settle
        self.cache = cache = Cache(layers=lent)
        return cache

    def mask_of_step(self, attention_mask: Tensor | None) -> Tensor | None:
        """Return the attention mask that `generate` must give the model in the next forward.

        For a prompt it is the same mask. For a decoded token it is a placeholder ``[1, 1, 1, 1]``,
        since every layer has a mask of its own; the first one lends the keys to buffers of a fixed
        size.
        """
        reader = self._of
        if reader.acts_next:
            return attention_mask
        if self.static is not None and self.static.steps == reader.max_new_tokens:
            self.end()
        if self.static is None:
            tokens, attachment = reader.tokens, reader.attachment
            assert tokens is not None
            assert attachment is not None
            # From then on only `generate` itself makes the mask longer and adds tokens.
            if attention_mask is not None:
                check_step(attention_mask, tokens)
            reader.abandon_forward()
            self.static = StaticSteps.of(reader.layers, tokens, attachment, reader.max_new_tokens)
            self._lend(list(self.static.layers))
        return self.static.advance()

    def note_ids(self, ids: Tensor) -> None:
        """Note the ids ``[batch, 1]`` of the token that `generate` reads next."""
        if self.cache is None:
            self._ids.clear()
        self._ids[self._of.seen] = ids
        if self._given:
            self._given = False
            for layer, each in zip(self._of.layers, self._lent, strict=True):
                each.lend(layer)

    def _move_positions(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Hook of the decoder: do not count tokens in positions that a restart has left out.

        Torch may call a hook that was just removed, for a call in another thread. The cache may be
        gone by then.
        """
        reader = self._reader()
        attached = None if reader is None else reader.attachment
        if reader is None or attached is None or not carries(attached.cache, args, kwargs):
            return None
        assert reader.now.tokens is not None
        return args, moved_positions(kwargs or {}, reader.now.tokens)

    def seen_since(self, index: int) -> int:
        """Return the number of tokens that a layer has read since the last record of tokens."""
        if self.static is not None:
            return self.static.steps - self.static.recorded
        return 0 if self.cache is None else self._lent[index].length - self._lent[index].start

    def mask_sizes(self, query_len: int, index: int, seen: int) -> tuple[int, int] | None:
        """Return the key length and key offset of a layer's next mask; None between answers."""
        if self.cache is None or self.static is not None:
            return None
        kept = self._lent[index].length
        return kept + query_len, seen - kept

    def settle(self, *, drops_last: bool = False) -> None:
        """Update layers and record by the tokens that every layer has written since."""
        reader = self._of
        if self.cache is None:
            return
        if self._thread is not threading.current_thread():
            raise CacheInUseError.by(self._thread)
        ahead = [each.length - each.start for each in self._lent]
        begun = max(ahead) if self.static is None else self.seen_since(0)
        count = max(min(*ahead, begun - int(drops_last)), 0)
        tokens = reader.now.tokens
        if tokens is None or not (
            count or any(each.contents.held is None for each in reader.layers)
        ):
            return
        for layer, each in zip(reader.layers, self._lent, strict=True):
            each.give(layer, each.start + count)
        self._given = True
        if self.static is not None:
            self.static.recorded += count
        columns = torch.ones(tokens.batch, count, dtype=torch.bool, device=tokens.valid.device)
        tokens = tokens.extended(
            tokens.positions_of(columns),
            columns,
            ids=self._ids_behind(tokens, count),
            padded=False,
            acts=False,
            skipped=None,
        )
        reader.take_tokens(tokens)

    def _ids_behind(self, tokens: SeenTokens, count: int) -> Tensor:
        """Return and forget the ids of the next ``count`` tokens, -1 if unknown."""
        device = tokens.valid.device
        unknown = torch.full((tokens.batch, 1), -1, device=device)
        ids = [self._ids.pop(tokens.seen + index, unknown).to(device) for index in range(count)]
        return torch.cat(ids, dim=1) if ids else unknown[:, :0]

    def end(self, *, failed: bool = False) -> None:
        """Take the keys back and register the hooks again.

        A last token that not every layer has written is forgotten. If something ``failed``, the
        last token is forgotten in any case, since a failure behind the layers leaves no trace; it
        can be read again.
        """
        self._may_begin = False
        if self.cache is None:
            return
        self.settle(drops_last=failed)
        static, self.static, self.cache, self._lent = self.static, None, None, []
        self._given = False
        self._removed.close()
        for layer in self._of.layers:
            layer.behind = None
            if static is not None:
                layer.release()
        assert self._of.attachment is not None
        self._of.attachment.attach()


def needs_no_hooks(run: PassRun, given: dict[str, Any], most: int) -> bool:
    """True if the tokens after this decoded token can be read without hooks on the model."""
    call, at, made = run.call, run.at, run.made
    model, end = call.model, at.before.seen + most
    return (
        type(run.made.at_queries) is AtQueries
        and not (call.own_masks or at.reach.padded)
        and call.attended is None
        and call.implementation == "sdpa"
        and not any(model.temperatures)
        and all(window is None or window >= end for window in model.windows)
        and all(_grows_alone(index, layer, run.attention) for index, layer in enumerate(at.layers))
        and _same_arguments(moved_positions(given, at.before), made.incoming.arguments)
    )


def _grows_alone(index: int, layer: PolicyLayer, attention: LayerAttention) -> bool:
    """True if a layer only has to append a token to what it holds."""
    contents = layer.contents
    if not layer.plain or not layer.facts.shows_queries or contents.held is None:
        return False
    if contents.padded:  # on other devices the calls for every head take longer than a mask
        on_cpu = contents.chosen is not None and contents.chosen.device.type == "cpu"
        return index in attention.plain and on_cpu and not layer.one_choice
    plain = isinstance(contents.held, Plain) and contents.held.is_at_hand
    return plain and index not in attention.told_or_masked


def moved_positions(arguments: dict[str, Any], tokens: SeenTokens) -> dict[str, Any]:
    """Return a decoder's arguments with positions that skip the tokens left out by a restart."""
    given = arguments.get("position_ids")
    if tokens.skipped is None or given is None:
        return arguments
    moved = (given - tokens.skipped[:, None]).clamp(min=0)
    return {**arguments, "position_ids": moved}


def _same_arguments(given: dict[str, Any], used: dict[str, Any]) -> bool:
    def same(one: Any, other: Any) -> bool:
        tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
        return one is other or (tensors and torch.equal(one, other))

    return given.keys() == used.keys() and all(same(used[name], given[name]) for name in given)
