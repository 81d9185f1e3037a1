"""Handle a model's forwards for a cache: turns, prompts in chunks, and undoing failures."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.checks import check_count
from kvpolicy.errors import CacheInUseError, UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers.forward.added_features import (
    span_with_features,
    without_seen,
)
from kvpolicy.integrations.transformers.forward.arriving import Arriving, OuterCall, ReadState
from kvpolicy.integrations.transformers.forward.chunks import Chunks
from kvpolicy.integrations.transformers.forward.facts import Call, ModelFacts, keeps_everything
from kvpolicy.integrations.transformers.forward.inputs import inputs_of
from kvpolicy.integrations.transformers.forward.lent_answer import LentAnswer
from kvpolicy.integrations.transformers.forward.output_order import joined_outputs
from kvpolicy.integrations.transformers.forward.pass_run import Passes, PassRun
from kvpolicy.integrations.transformers.forward.passes import KeyUse, Pass, PassEnded
from kvpolicy.integrations.transformers.forward.plan import Arrival
from kvpolicy.integrations.transformers.model import routing
from kvpolicy.integrations.transformers.model.attachment import Attachment
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layers import follow, held_by, hold_again
from kvpolicy.integrations.transformers.state.recurrent import link
from kvpolicy.integrations.transformers.state.storage import Storage
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy


class ForwardDispatcher:
    """A handler of a model's forwards for one cache, called by hooks on the model.

    A cache has one dispatcher. The policy acts on a forward that starts a turn, as the first one of
    a `generate` call does; other forwards append. If the end of the prompt is known, a forward that
    ends before it brings one chunk, and the policy acts on the forward that reaches the end. A
    forward that goes beyond the end brings draft tokens, and is read as two.

    Args:
        max_new_tokens: Answer tokens for which memory is reserved; None reserves none.
        layers: The layers of the cache; the cache's own list.

    Attributes:
        run: The run of the decoder that is under way; None without one.
        facts: What is known of the model that the cache was attached to last; None before.
        appends: Whether new turns are appended without the policy.
        plan: Lists the passes of a forward.
    """

    def __init__(
        self,
        policy: CachePolicy,
        storage: Storage,
        max_new_tokens: int | None,
        layers: list[PolicyLayer],
    ) -> None:
        self.policy = policy
        self.storage = storage
        self.max_new_tokens = max_new_tokens
        self.layers = layers
        self.now = ReadState()
        self.run: PassRun | None = None
        self.facts: ModelFacts | None = None
        self.answer = LentAnswer(self)
        self.attachment: Attachment | None = None
        self.filled_by: weakref.ref[nn.Module] | None = None
        self.appends = False
        self.plan: Callable[[Arrival], Passes] = Arrival.passes
        self._passes: Passes | None = None  # of the forward under way
        self._given: dict[str, Any] = {}  # the decoder's arguments in the forward under way
        self._in_generate = False
        self._first_output: Any = None  # of the prompt, if draft tokens came with it
        self._undo: ReadState | None = None  # of the forward under way
        self._before_call: ReadState | None = None
        self._outer = OuterCall()
        self._thread: threading.Thread | None = None  # the thread of the call

    @property
    def _attached(self) -> Attachment:
        assert self.attachment is not None
        return self.attachment

    # What has been read.

    @property
    def tokens(self) -> SeenTokens | None:
        """The record of the tokens that the cache has read; None if it has read none."""
        self.answer.settle()
        return self.now.tokens

    @tokens.setter
    def tokens(self, tokens: SeenTokens | None) -> None:
        self.now = attrs.evolve(self.now, tokens=tokens)

    @property
    def seen(self) -> int:
        """The number of input columns that the cache has read, padding included."""
        return self.seen_by(0)

    def seen_by(self, index: int) -> int:
        """Return the number of columns that a layer has seen, padding included."""
        before = 0 if self.now.tokens is None else self.now.tokens.seen
        return before + self.answer.seen_since(index)

    @property
    def acts_next(self) -> bool:
        """True if the policy acts on the next forward, or on the prompt that it is part of."""
        return self.now.tokens is None or self.now.starts_turn

    @property
    def may_drop(self) -> bool:
        """True if the policy may drop tokens between layers in the next forward."""
        return self.acts_next and self.facts is not None and bool(self.facts.acting)

    @property
    def may_evict(self) -> bool:
        """True if the policy acts on the next forward and may leave tokens out of the cache."""
        placed = self.policy if self.facts is None else self.facts.policy
        return self.acts_next and not keeps_everything(placed, len(self.layers))

    @property
    def is_unhooked(self) -> bool:
        """True if Transformers' own layers hold the keys of an answer."""
        return self.answer.cache is not None

    @property
    def at_work(self) -> PassRun | None:
        """The run whose layer is under way; None if the decoder is not running."""
        return None if self.run is None else self.run.part or self.run

    def recorded(self) -> ReadState:
        """Record the cache's whole state, so that a forward can be undone."""
        layers = held_by(self.layers)
        return attrs.evolve(self.now, layers=layers)

    def _go_back(self, before: ReadState) -> None:
        """Return the cache to a state that was recorded before."""
        assert before.layers is not None
        hold_again(self.layers, before.layers)
        self.now = attrs.evolve(before, layers=None)

    def reset(self) -> None:
        """Forget all that was read, so that the next forward reads a first prompt."""
        self.abandon_forward()
        self.answer.end()
        for layer in self.layers:
            layer.reset()
        self.now = ReadState()

    def take_tokens(self, tokens: SeenTokens) -> None:
        """Replace the record of the tokens seen, here and in all layers of the cache."""
        self.tokens = tokens
        follow(self.layers, tokens)

    # Turns.

    def start_turn(self, prompt_len: int | None = None) -> None:
        """Begin a turn in a hand-written loop; see `PolicyCache.start_turn`."""
        if prompt_len is not None:
            check_count("prompt_len", prompt_len, minimum=1)
        self._begin_turn(None if prompt_len is None else self.seen + prompt_len)

    def _begin_turn(self, prompt_end: int | None) -> None:
        self.abandon_forward()
        self.answer.end()
        starts = not self.appends
        self.now = attrs.evolve(self.now, starts_turn=starts, prompt_end=prompt_end, chunks=None)

    @contextmanager
    def new_turn(
        self, prompt_end: int | None, *, may_be_static: bool, unhooked: int | None
    ) -> Iterator[None]:
        """Start a turn for the length of a `with` block; undo it if its prompt was not read whole.

        ``prompt_end`` is the number of columns of the whole context at the end of the prompt, if
        this may be read in several forwards or with draft tokens behind it. ``unhooked`` is the
        largest number of answer tokens if they may be decoded without hooks.
        """
        before, outer = self.recorded(), (self._in_generate, self.answer.may_be_static)
        self._begin_turn(prompt_end)
        self._in_generate = True
        answer = self.answer
        answer.may_be_static = may_be_static and self._attached.alone and not self.appends
        answer.most = None if answer.is_compileable else unhooked
        try:
            yield
        except BaseException:
            self.answer.end(failed=True)
            raise
        finally:
            self.answer.end()
            answer.most = None
            self._in_generate, answer.may_be_static = outer
            self.abandon_forward()
            if self.now.starts_turn and self.now.prompt_end is not None:
                self._go_back(before)
            starts = self.now.starts_turn and before.starts_turn
            self.now = attrs.evolve(self.now, starts_turn=starts, prompt_end=None)

    # Calls of the model, which run the decoder and then a head.

    def begin_call(self, keep_last: int | None) -> None:
        """Begin a call of the model, which runs the decoder and then a head."""
        self._take_thread()
        self.abandon_forward()  # torch does not report Ctrl-C to hooks
        self._outer, self._before_call = OuterCall(keep_last), self.recorded()

    def note_call(self, arguments: Mapping[str, Any], kinds: Tensor | None) -> None:
        """Remember the arguments of a module that calls the decoder; see `OuterCall.note`."""
        self._outer.note(arguments, kinds)

    def end_call(self, *, failed: bool) -> None:
        """Finish a call of the model; if it failed, undo it and the decoder's forward."""
        if self._thread is not threading.current_thread():
            return  # the call was refused
        if failed:
            self.abandon_forward()
        outer, self._outer, self._before_call = self._outer, OuterCall(), None
        if not failed:
            self.answer.begin()
        if not failed and not outer.has_reached:
            raise UnsupportedModelError(
                f"{type(self._attached.parts.model).__name__} was called with the cache, but did "
                "not give it to its decoder, so that no policy has acted; call the inner model "
                "instead"
            )

    # Forwards of the decoder.

    def begin_forward(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Begin a forward of the decoder; return the arguments to run the decoder with."""
        self._take_thread()
        self._undo_forward(self._undo)
        self._arriving(ends=True).check_cache_is_used(arguments)
        self._outer.has_reached = True
        before = self.recorded()
        ends, end = True, self.now.prompt_end
        if self.acts_next and (end is not None or self.policy.prefill_block is not None):
            if end is not None and self._in_generate and self.seen:
                # It may pass the whole conversation again.
                arguments = without_seen(arguments, self.seen, end)
            try:
                arguments, ends = self._read_blocks(arguments)
            except BaseException:
                self._undo_forward(before)
                raise
        self._undo, self._given = before, arguments
        return self._take_up(arguments, ends=ends)

    def _arriving(self, *, ends: bool) -> Arriving:
        assert self.facts is not None
        return Arriving(self.facts, self._outer, self.now, self.acts_next, ends)

    def _take_up(self, arguments: dict[str, Any], *, ends: bool) -> dict[str, Any]:
        """Run the passes before the forward's main pass; return the arguments of the main pass."""
        starts = self.acts_next
        call, incoming, features = self._arriving(ends=ends).read(arguments)
        arrival = Arrival(
            call,
            self._attached.cache,
            self.layers,
            incoming,
            features,
            starts=starts,
            ends=ends,
            missing=self._missing(),
            chunks=self.now.chunks if starts else None,
            remember=self._remember,
        )
        self._passes = self.plan(arrival)
        made = next(self._passes)
        while not made.main:
            made = self._passes.send(self._through(call, made))
        self.run = PassRun(call, self.layers, made)
        return made.incoming.arguments

    def _through(self, call: Call, made: Pass) -> PassRun:
        """Run the decoder for a pass other than the main one, until the pass ends."""
        self.run = run = PassRun(call, self.layers, made)
        before = held_by(run.layers)
        try:
            # `forward` is called directly, since this code runs inside a hook of the decoder. What
            # is discarded is a choice of tokens, which has no gradient.
            with torch.no_grad():
                self._attached.parts.decoder.forward(**made.incoming.arguments)
        except PassEnded:
            return run
        finally:
            hold_again(run.layers, before)  # recurrent layers have read the tokens
        raise AssertionError("the layer at which the pass ends was never reached")

    def _rest(self, main: PassRun) -> None:
        """Run the passes that follow the main pass, which has ended."""
        assert self._passes is not None
        run = main
        try:
            while True:
                run = self._through(main.call, self._passes.send(run))
        except StopIteration:
            self.run = main

    def _remember(self, chunks: Chunks) -> None:
        self.now = attrs.evolve(self.now, chunks=chunks, starts_turn=True)

    def _read_blocks(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Read all blocks of the prompt but the last that is given; draft tokens come after it.

        Blocks are counted from the prompt's end, where rows padded on the left end together.
        Returns the arguments of what remains, and whether the policy acts at its end.
        """
        columns = inputs_of(arguments).shape[1]
        if self.now.prompt_end is None:
            self.now = attrs.evolve(self.now, prompt_end=self.seen + columns)
        while self.acts_next:
            missing = self._missing()
            if columns <= missing:
                return arguments, columns == missing
            arguments = self._read_prompt(arguments, missing, columns)
            columns -= missing
        return arguments, True

    def _missing(self) -> int:
        """Return how many columns follow up to the policy's next choice; 0 if that is unknown."""
        end, size = self.now.prompt_end, self.policy.prefill_block
        missing = 0 if end is None else end - self.seen
        return missing if size is None or not missing else (missing - 1) % size + 1

    def _read_prompt(self, arguments: dict[str, Any], missing: int, columns: int) -> dict[str, Any]:
        """Read the prompt, or a block, in a separate forward; return the arguments after it."""
        mask = arguments.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            raise UnsupportedGenerationError(
                "assistant_model, prompt_lookup_num_tokens and the policy's prefill_block must be "
                "None with a model that makes masks outside of its decoder, since these cannot be "
                "split into those of a prompt's blocks and of its drafts"
            )
        seen, first = self.seen, self._first_output
        prompt = {**span_with_features(arguments, seen, 0, missing), "return_dict": True}
        keep_last = self._outer.keep_last
        self._outer.keep_last = None if keep_last is None else 1
        output = self._attached.parts.decoder(**prompt)
        self._outer.keep_last = keep_last
        self._first_output = output if first is None else joined_outputs(first, output)
        return span_with_features(arguments, seen, missing, columns)

    def finish_forward(self, output: Any) -> Any:
        """Finish a forward of the decoder: update the cache, and return the decoder's output."""
        run = self.run
        assert run is not None
        try:
            self.tokens = run.finish()
            self._rest(run)
        except BaseException:
            self.abandon_forward()
            raise
        self.answer.look(run, self._given)
        self.filled_by = weakref.ref(self._attached.parts.decoder)
        if run.made.at_queries.keys is KeyUse.SELECT:
            end = self.now.prompt_end
            goes_on = end is not None and self.seen < end  # in another block
            self.now = ReadState(
                self.now.tokens, run.propagated, goes_on, prompt_end=end if goes_on else None
            )
        first, self._first_output = self._first_output, None
        self.run = self._undo = self._passes = None
        self._given = {}
        output = run.in_order(output)
        return output if first is None else joined_outputs(first, output)

    def fail_forward(self) -> None:
        """Undo a failed forward of the decoder, unless it was refused because of its thread."""
        if self._thread is threading.current_thread():
            self.abandon_forward()

    def _take_thread(self) -> None:
        own, other = threading.current_thread(), self._thread
        busy = self.run is not None or self._before_call is not None
        if busy and other is not None and other is not own and other.is_alive():
            raise CacheInUseError.by(other)
        self._thread = own

    def abandon_forward(self) -> None:
        """Undo a call of the model that did not finish, if there is one."""
        self._undo_forward(self._before_call or self._undo)
        self._before_call = None

    def _undo_forward(self, before: ReadState | None) -> None:
        if before is not None:
            self._go_back(before)
            routing.waiting.set(None)
        self.run = self._undo = self._first_output = self._passes = None
        self._given = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the cache's state for a copy, without the attachment to a model."""
        self.answer.settle()
        # A forward under way, or one that was interrupted, is not part of the copy.
        held = self._before_call or self._undo or self.recorded()
        layers = [each.fresh() for each in self.layers]
        assert held.layers is not None
        hold_again(layers, held.layers)
        for layer, own in zip(layers, self.layers, strict=True):
            layer.facts = attrs.evolve(own.facts, shows_queries=True, projection=None)
        link(layers)
        return {
            "policy": self.policy,
            "storage": self.storage,
            "max_new_tokens": self.max_new_tokens,
            "layers": layers,
            "now": attrs.evolve(held, propagated=dict(held.propagated), layers=None),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied cache, which is attached to no model and is decoding no answer."""
        self.__init__(  # type: ignore[misc]
            state["policy"], state["storage"], state["max_new_tokens"], state["layers"]
        )
        self.now = state["now"]
