"""Handle a model's forwards for a cache: turns, prompts in chunks, and undoing failures."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.checks import check_count
from kvpolicy.declarations import declares
from kvpolicy.errors import (
    CacheInUseError,
    NotAttachedError,
    UnsupportedGenerationError,
    UnsupportedModelError,
)
from kvpolicy.integrations.transformers.forward.added_features import (
    AddedFeatures,
    span_with_features,
)
from kvpolicy.integrations.transformers.forward.append import Forward
from kvpolicy.integrations.transformers.forward.attentions import AttendedKeys
from kvpolicy.integrations.transformers.forward.chunked_prefill import (
    ChunkForward,
    Chunks,
    LastChunkForward,
    joined_outputs,
)
from kvpolicy.integrations.transformers.forward.decoding.bounded import DecodingForward
from kvpolicy.integrations.transformers.forward.deferred_layers import choose
from kvpolicy.integrations.transformers.forward.fixed_answer import FixedAnswer
from kvpolicy.integrations.transformers.forward.inputs import (
    Incoming,
    inputs_of,
    read_inputs,
)
from kvpolicy.integrations.transformers.forward.layer_probe import LayerProbe
from kvpolicy.integrations.transformers.forward.prefill import ActingForward
from kvpolicy.integrations.transformers.forward.relative_positions import Columns
from kvpolicy.integrations.transformers.forward.restart import FilterPass, check_positions
from kvpolicy.integrations.transformers.forward.second_reading import SecondReading, check_tokens
from kvpolicy.integrations.transformers.forward.staged_prefill import StagedPrefill
from kvpolicy.integrations.transformers.forward.states import check_states_go_on
from kvpolicy.integrations.transformers.model import routing
from kvpolicy.integrations.transformers.model.attachment import Attachment
from kvpolicy.integrations.transformers.model.both_ways import cuts_of, types_in
from kvpolicy.integrations.transformers.model.masks import FLASH
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.model.quirks import ModelQuirks
from kvpolicy.integrations.transformers.state.cross import CrossLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer, State
from kvpolicy.integrations.transformers.state.recurrent import link
from kvpolicy.integrations.transformers.state.storage import Storage
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy


@attrs.frozen(eq=False)
class Snapshot:
    """A snapshot of all that a forward changes in a cache.

    Tensors are replaced, never written to.
    """

    layers: list[State]
    tokens: SeenTokens | None
    propagated: dict[int, Tensor]
    starts_turn: bool
    prompt_end: int | None
    chunks: Chunks | None


def keeps_everything(policy: CachePolicy, num_layers: int) -> bool:
    """True if a policy keeps and passes on every token of any prompt.

    Args:
        policy: The policy; its layers may still be open.
        num_layers: Number of layers of the model.
    """
    selector = policy.selector
    whole = selector.budget is not None and selector.budget.rate == 1
    keeps = whole or declares(selector, "keeps_all")
    return keeps and not policy.propagation.acting_layers(num_layers)


class ForwardDispatcher:
    """A dispatcher that a model's hooks call; it holds the state that forwards change.

    A cache has one reader. A forward appends its tokens, unless it starts a turn: then the policy
    acts on them. If the end of the prompt is known, a forward that ends before it is one chunk of
    the prompt, and is appended until the end comes. A forward that goes beyond the end brings draft
    tokens, and is read as two.

    Args:
        policy: Which tokens to keep.
        storage: How keys and values are held.
        max_new_tokens: Answer tokens for which memory is reserved; None reserves none.
        layers: The layers of the cache; the cache's own list.
    """

    def __init__(
        self,
        policy: CachePolicy,
        storage: Storage,
        max_new_tokens: int | None,
        layers: list[PolicyLayer],
    ) -> None:
        self.policy = policy
        self.quirks = ModelQuirks()
        self.placed = policy  # with open layers chosen for the model
        self.storage = storage
        self.max_new_tokens = max_new_tokens
        self.layers = layers
        self.fixed = FixedAnswer(self)
        self.propagated: dict[int, Tensor] = {}
        self.attachment: Attachment | None = None
        self.filled_by: weakref.ref[nn.Module] | None = None
        self.tokens: SeenTokens | None = None
        self.starts_turn = False
        self.appends = False  # whether new turns are appended without the policy
        self.prompt_end: int | None = None  # in columns; None: the end of the next forward
        self._in_generate = False  # it may pass the whole conversation again
        self.chunks: Chunks | None = None
        self._forward: Forward | None = None
        self._first_output: Any = None  # of the prompt, if draft tokens came with it
        self._undo: Snapshot | None = None
        # Number of last tokens whose outputs the current call asks for; None for all.
        self._keep_last: int | None = None
        self._before_call: Snapshot | None = None
        self._thread: threading.Thread | None = None  # the thread of the call
        # The mask that the outer model was called with, if the decoder gets another one.
        self._outer_mask: Any = None
        self._outer_called = False
        self._call_ids: Any = None  # ids of the call, if the decoder gets embeddings
        self._new_kinds: Tensor | None = None
        self._call_types: dict[str, Tensor] = {}  # types of tokens in the call
        self._call_read = False  # whether the current call has reached the decoder

    def start_turn(self, prompt_len: int | None = None) -> None:
        """Begin a new turn in a hand-written loop: the policy acts on the next forward.

        Args:
            prompt_len: Columns of the turn's prompt, if it is read in several forwards (chunked
                prefill): the policy then acts once, at the end of the prompt. None: the prompt is
                read in one forward.

        Raises:
            TypeError: ``prompt_len`` is not an int.
            ValueError: ``prompt_len`` is below 1.
        """
        if prompt_len is not None:
            check_count("prompt_len", prompt_len, minimum=1)
        self._begin_turn(None if prompt_len is None else self.seen + prompt_len)

    def _begin_turn(self, prompt_end: int | None) -> None:
        self.abandon_forward()
        self.fixed.end()
        self.fixed.steps = 0
        self.starts_turn, self.prompt_end, self.chunks = not self.appends, prompt_end, None

    @contextmanager
    def new_turn(
        self, prompt_end: int | None = None, *, may_be_static: bool = False
    ) -> Iterator[None]:
        """Start a turn; undo it if no forward has ended its prompt by the end of the block.

        Args:
            prompt_end: Number of columns of the whole context at the end of the prompt, if the
                prompt may be read in several forwards or with draft tokens behind it.
            may_be_static: Whether the answer may be decoded into buffers of a fixed size.
        """
        assert self.attachment is not None
        before, outer = self._snapshot(), (self._in_generate, self.fixed.allowed)
        self._begin_turn(prompt_end)
        self._in_generate = True
        self.fixed.allowed = may_be_static and self.attachment.alone and not self.appends
        try:
            yield
        except BaseException:
            self.fixed.end(failed=True)
            raise
        finally:
            self.fixed.end()
            self._in_generate, self.fixed.allowed = outer
            self.abandon_forward()
            if self.chunks is not None:
                self._restore(before)
            self.starts_turn = self.starts_turn and before.starts_turn
            self.prompt_end = None

    def begin_call(self, keep_last: int | None) -> None:
        """Begin a call of the model, which runs the decoder and then a head.

        Args:
            keep_last: Number of last tokens whose outputs the call asks for; None for all.
        """
        self._take_thread()
        self.abandon_forward()  # torch does not report Ctrl-C to hooks
        self._outer_called, self._outer_mask, self._new_kinds = False, None, None
        self._call_ids, self._call_read, self._call_types = None, False, {}
        self._keep_last, self._before_call = keep_last, self._snapshot()

    def note_call(self, arguments: Mapping[str, Any], kinds: Tensor | None) -> None:
        """Remember the arguments of a module around the decoder.

        Args:
            arguments: By name.
            kinds: ``[batch, new_len]`` int8, the `TokenKind` of its tokens; None if unknown.
        """
        mask = arguments.get("attention_mask")
        self._call_ids = arguments.get("input_ids", self._call_ids)
        self._new_kinds = self._new_kinds if kinds is None else kinds
        self._call_types |= types_in(arguments)
        if not self._outer_called or (isinstance(mask, Tensor) and mask.ndim == 2):
            self._outer_called, self._outer_mask = True, mask

    def end_call(self, *, failed: bool) -> None:
        """Finish a call of the model; if it failed, undo it and the decoder's forward.

        Raises:
            UnsupportedModelError: The model did not give its decoder the cache.
        """
        if self._thread is not threading.current_thread():
            return  # the call was refused
        if failed:
            self.abandon_forward()
        self._keep_last = self._before_call = self._call_ids = None
        self._call_types = {}
        if not failed and not self._call_read:
            assert self.attachment is not None
            raise UnsupportedModelError(
                f"{type(self.attachment.parts.model).__name__} was called with the cache, but did "
                "not give it to its decoder, so that no policy has acted; call the model inside"
            )

    @property
    def room(self) -> int:
        """The number of slots to reserve in each layer behind the kept ones."""
        return self.room_for(self.max_new_tokens)

    def room_for(self, longest: int | None) -> int:
        """Return the number of slots to reserve for answers of another length.

        Args:
            longest: Number of tokens of the longest answer; None if unknown.
        """
        if self.policy.decoding is None:
            return longest or 0
        every = self.policy.decoding.every
        return every if longest is None else min(longest, every)

    @property
    def seen(self) -> int:
        """The number of columns seen, padding included."""
        return 0 if self.tokens is None else self.tokens.seen

    @property
    def acts_next(self) -> bool:
        """True if the policy acts on the next forward, or on the prompt that it is part of."""
        return self.tokens is None or self.starts_turn

    @property
    def is_static(self) -> bool:
        """True if an answer is being decoded into fixed buffers."""
        return self.fixed.buffers is not None

    @property
    def may_drop(self) -> bool:
        """True if the next forward may drop tokens."""
        return self.acts_next and self._drops

    @property
    def may_evict(self) -> bool:
        """True if the policy acts on the next forward and may keep fewer tokens than there are."""
        return self.acts_next and not keeps_everything(self.placed, len(self.layers))

    @property
    def makes_masks(self) -> bool:
        """True if the forward makes its own mask for each layer.

        The model's mask is then used only for how the new tokens see each other.
        """
        forward = self._forward
        return forward is not None and forward.in_prompt and not forward.first

    @property
    def _drops(self) -> bool:
        return bool(self.placed.propagation.acting_layers(len(self.layers)))

    @property
    def forward(self) -> Forward:
        """The forward that is under way."""
        if self._forward is None:
            raise NotAttachedError(
                "a decoder layer was called with a PolicyCache outside its model's forward; call "
                "the model itself inside `with cache.attached(model):`"
            )
        return self._forward

    def begin_forward(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Begin a forward of the decoder; return the arguments to run it with.

        If a model around the decoder makes the masks, the decoder gets these masks. Padding is then
        read from the mask that the outer model was called with.

        Raises:
            TypeError: See `read_inputs`.
            ValueError: See `read_inputs`.
            CacheInUseError: Another thread is calling the model with the same cache.
            UnsupportedGenerationError: The model is told to use no cache; or hidden states are
                asked for while tokens of a prompt in chunks are dropped; or drafts come with a
                model that makes its masks outside the decoder.
            UnsupportedModelError: The policy cannot act on this forward of the model, for example
                because the context exceeds a sliding window.
        """
        self._take_thread()
        self._undo_forward(self._undo)
        self._check_cache_is_used(arguments)
        self._call_read = True
        before = self._snapshot()
        ends = True
        if self.acts_next and self.prompt_end is not None:
            arguments = self._without_seen(arguments)
            missing = self.prompt_end - self.seen
            columns = inputs_of(arguments).shape[1]
            ends = columns >= missing
            if columns > missing:
                if isinstance(arguments.get("attention_mask"), dict):
                    raise UnsupportedGenerationError(
                        "assistant_model and prompt_lookup_num_tokens must be None with a model "
                        "that makes masks outside of its decoder, which cannot be cut into those "
                        "of a prompt and of its drafts"
                    )
                arguments = self._read_prompt(arguments, missing, columns)
        self._undo = before
        self._forward, taken = self._take_up(arguments, ends=ends)
        return taken

    def _check_cache_is_used(self, arguments: dict[str, Any]) -> None:
        assert self.attachment is not None
        asked, config = arguments.get("use_cache"), self.attachment.parts.config
        name = "use_cache" if asked is not None else "use_cache of the model's config"
        if (getattr(config, "use_cache", None) if asked is None else asked) is False:
            raise UnsupportedGenerationError(
                f"{name} must be True with a PolicyCache, got False; set it, or pass use_cache=True"
            )

    def _take_up(self, arguments: dict[str, Any], *, ends: bool) -> tuple[Forward, dict[str, Any]]:
        assert self.attachment is not None
        parts = self.attachment.parts
        if parts.own_caches_only:
            arguments = {**arguments, "use_cache": False}
        starts, implementation = self.acts_next, parts.implementation
        acts = starts and ends
        if starts and self.chunks is None:
            parts.check_turn(self.seen)
        made = arguments.get("attention_mask")
        outside, arguments = self._masks_made_outside(arguments)
        features = AddedFeatures.of(arguments) if starts else None
        incoming = read_inputs(
            arguments if features is None else features.without(arguments),
            self.tokens,
            acts=acts,
            starts=starts and self.chunks is None,
            ends=ends,
        )
        incoming = attrs.evolve(incoming, ids=self._ids_of(arguments))
        if incoming.tokens.padded or incoming.padded:
            parts.check_padding(self.quirks)
        if not self.quirks.counts:
            self._check_positions_given(arguments, incoming, ends=ends)
        if starts and (self.chunks is not None or not ends):
            self._check_cuts(incoming, ends=ends)
        if parts.holds_states:
            check_states_go_on(incoming, several=self.quirks.continues)
        kinds, self._new_kinds = self._new_kinds, None
        if kinds is not None and kinds.shape == incoming.columns.shape:
            incoming = attrs.evolve(incoming, kinds=kinds)
        if self.placed.gapless and arguments.get("position_ids") is not None:
            check_positions(self.placed, incoming)
        if starts and self.placed.rereading is not None:
            check_tokens(self.placed, incoming)
        if features is not None and incoming.order is not None:
            features = features.taken(incoming.order)
        if starts:
            lengths = incoming.tokens.lengths + incoming.new_valid.sum(dim=1)
            parts.check_policy(self.placed, int(lengths.max()))
            if self._drops:
                parts.check_logits(self.placed, self._keep_last)
                parts.check_rows(self.placed, len(lengths), int(lengths.max()))
        if outside:
            taken = {**incoming.arguments, "attention_mask": made}
            incoming = attrs.evolve(incoming, arguments=taken)
        kind: dict[str, Any] = {
            "implementation": implementation,
            "windows": parts.windows,
            "answer_windows": parts.answer_windows,
            "temperatures": parts.temperatures,
            "own_masks": outside,
            "spares_masks": self.quirks.spares_masks,
            "causal": parts.causal,
            "rotary": getattr(parts.decoder, "rotary_emb", None),
            "asked": LayerProbe.of(parts, self.placed),
            "attended": (
                AttendedKeys([i for i, each in enumerate(parts.attentions) if each is not None])
                if _asked(arguments, parts, "output_attentions")
                else None
            ),
        }
        if not starts:
            bounded = self.placed.decoding is not None
            append = DecodingForward if bounded else Forward
            return append(self.placed, self.layers, incoming, **kind), incoming.arguments
        kind |= self._narrowing(arguments, parts)
        if self._drops and (self.chunks is not None or not ends):
            return self._take_up_stage(arguments, incoming, features, kind, ends=ends)
        if not ends:
            chunks = self.chunks or Chunks(self.placed.num_queries)
            assert self.prompt_end is not None
            missing = self.prompt_end - self.seen
            chunk = ChunkForward(
                self.placed,
                self.layers,
                incoming,
                chunks=chunks,
                missing=missing,
                features=features,
                **kind,
            )
            return chunk, incoming.arguments
        if self.chunks is not None:
            chunks = self.chunks
            last = LastChunkForward(
                self.placed, self.layers, incoming, chunks=chunks, features=features, **kind
            )
            return last, incoming.arguments
        propagated: dict[int, Tensor] = {}
        if self.placed.propagation.restarts:
            first = FilterPass(self.placed, self.layers, incoming, features=features, **kind)
            self._forward = first
            incoming, propagated = first.run(parts.decoder), first.propagated
            features = first.features
        forward = ActingForward(self.placed, self.layers, incoming, features=features, **kind)
        forward.propagated.update(propagated)
        return forward, incoming.arguments

    def _take_up_stage(
        self,
        arguments: dict[str, Any],
        incoming: Incoming,
        features: AddedFeatures | None,
        kind: dict[str, Any],
        *,
        ends: bool,
    ) -> tuple[Forward, dict[str, Any]]:
        """Begin the forward over a chunk of a prompt of which tokens are dropped."""
        assert self.attachment is not None
        assert self.prompt_end is not None
        parts = self.attachment.parts
        records = _asked(arguments, parts, "output_hidden_states")
        prefill = StagedPrefill(
            self.placed,
            self.layers,
            parts.decoder,
            kind,
            self._begin,
            records=records,
            features=features,
        )
        if ends:
            assert self.chunks is not None
            return prefill.end(incoming, self.chunks)
        missing = self.prompt_end - self.seen
        return prefill.chunk(incoming, self.chunks, missing), incoming.arguments

    def _check_cuts(self, incoming: Incoming, *, ends: bool) -> None:
        """Check that no token of a chunked prompt sees a token of a later chunk.

        Raises:
            UnsupportedModelError: A token does.
        """
        assert self.attachment is not None
        begun = self.seen - (0 if self.chunks is None else self.chunks.columns)
        valid = torch.cat([incoming.tokens.valid, incoming.columns], dim=1)
        cuts = cuts_of(self.attachment.parts.model, self._call_types, valid, begun)
        if cuts is None:
            return
        for column in [self.seen] if ends else [self.seen, valid.shape[1]]:
            if begun < column < len(cuts.forbidden) - 1 and bool(cuts.forbidden[column]):
                raise cuts.refused(column, begun)

    def _begin(self, forward: Forward) -> None:
        self._forward = forward

    def _check_positions_given(
        self, arguments: dict[str, Any], incoming: Incoming, *, ends: bool
    ) -> None:
        """Check that position ids are given if the model does not count from 0 and they are needed.

        Raises:
            UnsupportedModelError: They are not; the cache cannot know the number from which the
                model counts.
        """
        needed = incoming.arguments.get("position_ids") is not None
        restarts = self.acts_next and self.placed.propagation.restarts
        restarts |= self.may_drop and not (ends and self.chunks is None)
        if arguments.get("position_ids") is None and (needed or restarts):
            assert self.attachment is not None
            raise UnsupportedModelError(
                f"position_ids must be given with {type(self.attachment.parts.model).__name__}, "
                "which counts from a number of its own without them, where rows are padded, a "
                "policy restarts the prefill, or a prompt of which tokens are dropped comes in "
                "chunks; give each row's own, as generate does"
            )

    def _ids_of(self, arguments: dict[str, Any]) -> Tensor | None:
        """Return the ids ``[batch, new_len]`` of a forward; None if only embeddings are known."""
        shape = inputs_of(arguments).shape[:2]
        for ids in (arguments.get("input_ids"), self._call_ids):
            if isinstance(ids, Tensor) and ids.shape == shape:
                return ids
        return None

    def note_answer(self, ids: Tensor, first: int) -> None:
        """Remember the ids of an answer that was decoded into fixed buffers.

        Args:
            ids: ``[batch, count]``; the last of them may not have been read.
            first: The column of the first id.
        """
        if self.tokens is not None and len(ids) == self.tokens.batch:
            self.tokens = self.tokens.with_answer(ids, first)
            for layer in self.layers:
                layer.follow(self.tokens)

    def _masks_made_outside(self, arguments: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Find out if an outer model makes the masks; return that, and the arguments.

        If so, the arguments get the outer model's own mask.
        """
        made, outer = arguments.get("attention_mask"), self._outer_mask
        self._outer_mask = None
        if not isinstance(outer, Tensor) or outer.ndim != 2:
            # A call without padding may have no mask.
            outside = self._outer_called and outer is None and not _is_plain(made)
        else:
            # The outer model may have made no mask, although its own mask was given.
            outside = made is None or not _is_plain(made)
        self._outer_called = False
        return outside, {**arguments, "attention_mask": outer} if outside else arguments

    def _narrowing(self, arguments: dict[str, Any], parts: ModelParts) -> dict[str, Any]:
        """Return the settings for running layers on some of their tokens only."""
        # Narrowing replaces flash attention by sdpa, which has neither softcap nor sinks.
        replaced = parts.implementation in FLASH and not parts.plain_scores

        # Transformers records hidden states as layers get them, and narrowing would cut these.
        states = _asked(arguments, parts, "output_hidden_states")
        keep_last = None if states else self._keep_last
        whole = states or replaced or not parts.passes_on
        narrows = not (_asked(arguments, parts, "output_attentions") or whole)
        return {
            "narrows": narrows and self.quirks.narrows,
            "keep_last": keep_last,
            "refills": self.quirks.refills,
        }

    def _without_seen(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Cut a forward over the whole conversation to its new columns."""
        seen, columns = self.seen, inputs_of(arguments).shape[1]
        mask = arguments.get("attention_mask")
        whole = columns if not isinstance(mask, Tensor) else mask.shape[-1]
        assert self.prompt_end is not None
        if not self._in_generate or not seen or whole != columns or columns < self.prompt_end:
            return arguments
        return {
            **span_with_features(arguments, 0, seen, columns),
            "attention_mask": mask,
        }

    def _read_prompt(self, arguments: dict[str, Any], missing: int, columns: int) -> dict[str, Any]:
        """Read the prompt in a forward of its own; return the arguments of the drafts behind it."""
        assert self.attachment is not None
        seen = self.seen
        prompt = {**span_with_features(arguments, seen, 0, missing), "return_dict": True}
        keep_last = self._keep_last
        self._keep_last = None if keep_last is None else 1
        output = self.attachment.parts.decoder(**prompt)
        self._keep_last = keep_last
        self._first_output = output
        return span_with_features(arguments, seen, missing, columns)

    def finish_forward(self, output: Any) -> Any:
        """Store the result of the forward in the cache; return the decoder's output.

        Raises:
            UnsupportedModelError: A layer did not use the cache.
        """
        forward = self.forward
        try:
            self.tokens = forward.finish()
            if isinstance(forward, ActingForward) and forward.waiting:
                self._choose_after_all(forward)
        except BaseException:
            self.abandon_forward()
            raise
        assert self.attachment is not None
        self.filled_by = weakref.ref(self.attachment.parts.decoder)
        if isinstance(forward, ChunkForward):
            self.chunks, self.starts_turn = forward.chunks, True
        elif forward.acts:
            self.propagated = forward.propagated
            self.starts_turn, self.prompt_end, self.chunks = False, None, None
        first, self._first_output = self._first_output, None
        self._forward, self._undo = None, None
        output = forward.in_order(output)
        return output if first is None else joined_outputs(first, output)

    def _choose_after_all(self, forward: ActingForward) -> None:
        """Let layers with a deferred selection choose, after a second reading if there is one."""
        assert self.attachment is not None
        waiting, parts = forward.waiting, self.attachment.parts
        if self.placed.rereading is not None:
            arguments: dict[str, Any] = {
                "past_key_values": self.attachment.cache,
                "use_cache": not parts.own_caches_only,
            }
            kind: dict[str, Any] = {
                "implementation": parts.implementation,
                "windows": parts.windows,
                "temperatures": parts.temperatures,
                "spares_masks": self.quirks.spares_masks,
                "causal": parts.causal,
                "rotary": getattr(parts.decoder, "rotary_emb", None),
            }
            again = SecondReading(
                self.placed, self.layers, waiting, forward.tokens, parts.decoder, arguments, kind
            )
            found: dict[int, Tensor] = {}
            for each, given in again.passes(found):
                self._forward = each
                each.run(parts.decoder, given)
            self._forward, waiting = forward, again.scored(found)
        choose(self.placed, self.layers, waiting)

    def fail_forward(self) -> None:
        """Undo a forward of the decoder, unless it was refused as another thread's."""
        if self._thread is threading.current_thread():
            self.abandon_forward()

    def _take_thread(self) -> None:
        own, other = threading.current_thread(), self._thread
        busy = self._forward is not None or self._before_call is not None
        if busy and other is not None and other is not own and other.is_alive():
            raise CacheInUseError.by(other)
        self._thread = own

    def abandon_forward(self) -> None:
        """Undo a call of the model that did not finish; do nothing if there is none."""
        self._undo_forward(self._before_call or self._undo)
        self._before_call = None

    def _undo_forward(self, before: Snapshot | None) -> None:
        if before is not None:
            self._restore(before)
            routing.waiting.set(None)
        self._forward, self._undo, self._first_output = None, None, None

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            [layer.state() for layer in self.layers],
            self.tokens,
            dict(self.propagated),
            self.starts_turn,
            self.prompt_end,
            self.chunks,
        )

    def _restore(self, before: Snapshot) -> None:
        for layer, state in zip(self.layers, before.layers, strict=True):
            layer.restore(state)
        self.tokens = before.tokens
        self.propagated = dict(before.propagated)
        self.starts_turn, self.prompt_end = before.starts_turn, before.prompt_end
        self.chunks = before.chunks

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: everything except the attachment to a model."""
        self.fixed.read_queries()
        # A forward under way, or one that was interrupted, is not part of the copy.
        held = self._before_call or self._undo or self._snapshot()
        layers = [each.fresh() for each in self.layers]
        for layer, own, each in zip(layers, self.layers, held.layers, strict=True):
            layer.restore(each)
            layer.query_heads, layer.spread = own.query_heads, own.spread
            layer.scores, layer.expands, layer.turns = own.scores, own.expands, own.turns
        link(layers)
        tokens = None if held.tokens is None else self.fixed.copied(layers, held.tokens)
        state = {**self.__dict__, "layers": layers, "propagated": dict(held.propagated)}
        del state["fixed"]
        return {
            **state,
            "appends": False,
            "tokens": tokens,
            "starts_turn": held.starts_turn,
            "prompt_end": held.prompt_end,
            "chunks": held.chunks,
            "_in_generate": False,
            "attachment": None,
            "filled_by": None,
            "_forward": None,
            "_first_output": None,
            "_undo": None,
            "_before_call": None,
            "_thread": None,
            "_outer_mask": None,
            "_call_ids": None,
            "_call_types": {},
            "_new_kinds": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which has no answer under way."""
        self.__dict__.update(state)
        self.fixed = FixedAnswer(self)

    def note_state(self, index: int) -> None:
        """Note that a layer reads or writes its state.

        Raises:
            NotAttachedError: The cache is not attached to the model that calls.
        """
        self._attached_forward().note_state(index)

    def columns(self, index: int) -> Columns | None:
        """Return the columns to report to a layer's attention; see `Forward`."""
        return None if self._forward is None else self._forward.columns(index)

    def _attached_forward(self) -> Forward:
        if self._forward is None:
            raise NotAttachedError(
                "cache must be attached to the model for its policy to act: use "
                "model.generate(past_key_values=cache), or call the model inside "
                "`with cache.attached(model):`"
            )
        return self._forward

    def update(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values; return all that its attention must see.

        Raises:
            NotAttachedError: The cache is not attached to the model that calls.
        """
        self._forward = self._attached_forward()
        layer = self.layers[index]
        if isinstance(layer, CrossLayer):
            return layer.with_images(keys, values)
        keys, values = self._forward.update(index, keys, values)
        if self._forward.waits_for_queries():
            assert self.attachment is not None
            module = self.attachment.parts.attentions[index]
            assert module is not None  # the module that made these keys
            routing.waiting.set((self._forward, index, module))
        return keys, values

    def update_index(self, index: int, keys: Tensor) -> Tensor:
        """Add a layer's new index keys; return all that its indexer must see.

        Raises:
            NotAttachedError: The cache is not attached to the model that calls.
        """
        return self._attached_forward().update_index(index, keys)


def _is_plain(mask: Any) -> bool:
    """True if a mask is None, or ``[batch, columns]`` of tokens and padding."""
    return mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)


def _asked(arguments: dict[str, Any], parts: ModelParts, name: str) -> bool:
    """True if a forward must return an additional output, for example attention weights."""
    return bool(arguments.get(name, getattr(parts.config, name, False)))
