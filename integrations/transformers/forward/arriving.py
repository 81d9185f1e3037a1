"""Read and check a forward's arguments before it runs, by what the cache has read so far."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.chunks import Chunks
from kvpolicy.integrations.transformers.forward.facts import Call, ModelFacts
from kvpolicy.integrations.transformers.forward.inputs import Incoming, inputs_of, read_inputs
from kvpolicy.integrations.transformers.forward.second_reading import check_tokens
from kvpolicy.integrations.transformers.model.both_ways import cuts_of, types_in
from kvpolicy.integrations.transformers.state.layers import LayersHeld
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy


@attrs.frozen(eq=False)
class ReadState:
    """An immutable record of what a cache has read; by default it has read nothing.

    It has all that forwards change in a cache, so that undoing a forward is one assignment; see
    "Undo, copies, threads" in docs/architecture.md.

    Args:
        propagated: For each layer that dropped tokens in the last prompt, the positions it passed
            on.
        starts_turn: Whether the next forward starts a turn, so that the policy acts on it.
        prompt_end: Number of columns seen at the end of the prompt that is being read; None if it
            ends with the next forward.
        chunks: The record of the earlier chunks of this prompt; None if there were none.
        layers: What the layers hold, as it was when this was recorded; None in the state that a
            cache is in.
    """

    tokens: SeenTokens | None = None
    propagated: Mapping[int, Tensor] = attrs.field(factory=dict)
    starts_turn: bool = False
    prompt_end: int | None = None
    chunks: Chunks | None = None
    layers: LayersHeld | None = None


@attrs.define(eq=False)
class OuterCall:
    """A record of what a model was called with and does not hand to its decoder.

    Args:
        keep_last: Number of last tokens whose outputs are asked for; None for all.
        ids: Ids of the tokens, if the decoder gets embeddings.
        kinds: ``[batch, new_len]`` int8, the `TokenKind` of the tokens; None if unknown.
    """

    keep_last: int | None = None
    ids: Any = None
    kinds: Tensor | None = None
    types: dict[str, Tensor] = attrs.field(factory=dict)
    has_reached: bool = False
    _mask: Any = None
    _noted: bool = False

    def note(self, arguments: Mapping[str, Any], kinds: Tensor | None) -> None:
        """Remember the arguments of a module that calls the decoder, such as the model itself."""
        mask = arguments.get("attention_mask")
        self.ids = arguments.get("input_ids", self.ids)
        self.kinds = self.kinds if kinds is None else kinds
        self.types |= types_in(arguments)
        if not self._noted or (isinstance(mask, Tensor) and mask.ndim == 2):
            self._noted, self._mask = True, mask

    def ids_of(self, arguments: dict[str, Any]) -> Tensor | None:
        """Return the ids ``[batch, new_len]`` of a forward; None if only embeddings are known."""
        shape = inputs_of(arguments).shape[:2]
        for ids in (arguments.get("input_ids"), self.ids):
            if isinstance(ids, Tensor) and ids.shape == shape:
                return ids
        return None

    def take_kinds(self, columns: Tensor) -> Tensor | None:
        """Return the `TokenKind` of each token in ``columns``, and forget it; None if unknown.

        What follows in the same call is left.
        """
        kinds, self.kinds, count = self.kinds, None, columns.shape[1]
        if kinds is None or len(kinds) != len(columns) or kinds.shape[1] < count:
            return None
        self.kinds = kinds[:, count:] if kinds.shape[1] > count else None
        return kinds[:, :count]

    def masks_made_outside(self, arguments: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Return whether an outer model makes the masks, and the arguments to read."""
        made, outer, noted = arguments.get("attention_mask"), self._mask, self._noted
        self._mask, self._noted = None, False
        if not isinstance(outer, Tensor) or outer.ndim != 2:
            # A call without padding may have no mask.
            outside = noted and outer is None and not _is_plain(made)
        else:
            # The outer model may have made no mask, although its own mask was given.
            outside = made is None or not _is_plain(made)
        return outside, {**arguments, "attention_mask": outer} if outside else arguments


def _is_plain(mask: Any) -> bool:
    """True if a mask is None, or a padding mask ``[batch, columns]``."""
    return mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)


@attrs.frozen(eq=False)
class Arriving:
    """A forward whose arguments are about to be checked; see `Arrival`."""

    model: ModelFacts
    outer: OuterCall
    now: ReadState
    starts: bool
    ends: bool

    @property
    def _in_chunks(self) -> bool:
        return self.now.chunks is not None or not self.ends

    def read(self, arguments: dict[str, Any]) -> tuple[Call, Incoming, AddedFeatures | None]:
        """Read and check the arguments with which the decoder is called.

        Returns what the forward asks for, its tokens, and features to add to hidden states between
        layers in place of the decoder. If a model around the decoder makes the masks, the decoder
        gets these, and padding is read from the mask that the outer model was called with.
        """
        model, parts, outer, starts = self.model, self.model.parts, self.outer, self.starts
        if parts.own_caches_only:
            arguments = {**arguments, "use_cache": False}
        made = arguments.get("attention_mask")
        outside, arguments = outer.masks_made_outside(arguments)
        features = AddedFeatures.of(arguments) if starts else None
        seen, end = 0 if self.now.tokens is None else self.now.tokens.seen, self.now.prompt_end
        # The prompt may go on behind the forward's tokens, in another block.
        goes_on = end is not None and seen + inputs_of(arguments).shape[1] < end
        incoming = read_inputs(
            arguments if features is None else features.without(arguments),
            self.now.tokens,
            acts=starts and self.ends,
            starts=starts and self.now.chunks is None,
            ends=self.ends and not (starts and goes_on),
        )
        kinds = outer.take_kinds(incoming.columns)
        incoming = attrs.evolve(incoming, ids=outer.ids_of(arguments), kinds=kinds)
        self.check(arguments, incoming)
        if features is not None and incoming.order is not None:
            features = features.taken(incoming.order)
        if outside:
            taken = {**incoming.arguments, "attention_mask": made}
            incoming = attrs.evolve(incoming, arguments=taken)
        call = Call.of(model, arguments, own_masks=outside, keep_last=outer.keep_last)
        return call, incoming, features

    def check(self, arguments: dict[str, Any], incoming: Incoming) -> None:
        """Check that the policy can act on the forward's tokens and positions; see `read`."""
        model, parts, policy = self.model, self.model.parts, self.model.policy
        if incoming.tokens.padded or incoming.padded:
            parts.check_padding(model.quirks)
        if not model.quirks.counts:
            self._check_positions_given(arguments, incoming)
        if self.starts and (self._in_chunks or policy.prefill_block is not None):
            self._check_cuts(incoming)
        if parts.holds_states:
            check_states_go_on(incoming, several=model.quirks.continues)
        if policy.gapless and arguments.get("position_ids") is not None:
            check_positions(policy, incoming)
        if not self.starts:
            return
        if policy.rereading is not None:
            check_tokens(policy, incoming)
        lengths = incoming.tokens.lengths + incoming.new_valid.sum(dim=1)
        longest = int(lengths.max())
        parts.check_policy(policy, longest)
        if model.acting:
            parts.check_logits(policy, self.outer.keep_last)
            parts.check_rows(policy, len(lengths), longest)

    def _check_cuts(self, incoming: Incoming) -> None:
        """Check that no token of a chunked prompt attends to a token of a later chunk."""
        seen = incoming.tokens.seen
        begun = seen - (0 if self.now.chunks is None else self.now.chunks.columns)
        valid = torch.cat([incoming.tokens.valid, incoming.columns], dim=1)
        cuts = cuts_of(self.model.parts.model, self.outer.types, valid, begun)
        if cuts is None:
            return
        for column in [seen, valid.shape[1]]:
            if begun < column < len(cuts.forbidden) - 1 and bool(cuts.forbidden[column]):
                raise cuts.refused(column, begun)

    def _check_positions_given(self, arguments: dict[str, Any], incoming: Incoming) -> None:
        """Check that position ids are given if the model does not count from 0 and needs them."""
        needed = incoming.arguments.get("position_ids") is not None
        drops_later = self.starts and self.model.acting and self._in_chunks
        restarts = (self.starts and self.model.restarts) or drops_later
        if arguments.get("position_ids") is None and (needed or restarts):
            raise UnsupportedModelError(
                f"position_ids must be given to {type(self.model.parts.model).__name__}, which "
                "does not count from 0 without them, if rows are padded, if a policy restarts "
                "the prefill, or if it drops tokens of a prompt that comes in chunks; give each "
                "row's own, as generate does"
            )

    def check_cache_is_used(self, arguments: dict[str, Any]) -> None:
        """Check that neither the call nor the model's configuration turns the cache off."""
        asked, config = arguments.get("use_cache"), self.model.parts.config
        name = "use_cache" if asked is not None else "use_cache of the model's config"
        if (getattr(config, "use_cache", None) if asked is None else asked) is False:
            raise UnsupportedGenerationError(
                f"{name} must be True with a PolicyCache, got False; set it, or pass use_cache=True"
            )


def check_states_go_on(incoming: Incoming, *, several: bool) -> None:
    """Check that recurrent layers can continue from their states with a forward's tokens."""
    if incoming.moved is not None:
        raise UnsupportedModelError(
            "attention_mask must not turn tokens already read into padding if layers are "
            "recurrent, since they cannot be removed from a state; give every row its answer up "
            "to the last token, or read rows one at a time"
        )
    valid, started = incoming.new_valid, incoming.tokens.lengths > 0
    if incoming.padded:
        between = (valid[:, :-1] & ~valid[:, 1:]).any(dim=1) | (started & ~valid.all(dim=1))
    if incoming.padded and bool(between.any()):
        row = int(between.nonzero()[0])
        raise UnsupportedModelError(
            "padding must come before all tokens of a row if layers are recurrent, since a state "
            f"cannot skip it, but row {row} has tokens before its padding; give rows turns of one "
            "length, or read them one at a time"
        )
    if not several and valid.shape[1] > 1 and bool(started.any()):
        raise UnsupportedModelError(
            f"one token at a time must follow what the cache has read, got {valid.shape[1]}: if "
            "the model's recurrent layers read several, they start from an empty state, with any "
            "cache; give the whole conversation to a new PolicyCache, in one forward"
        )


def check_positions(policy: CachePolicy, incoming: Incoming) -> None:
    """Check that given position ids count each row's own tokens from 0, as the policy needs."""
    given = incoming.arguments.get("position_ids")
    if given is None:
        return
    why = f"{policy.propagation} restarts the prefill"
    if policy.gapless:
        why = f"{policy} rotates keys to positions without gaps"
    own = incoming.tokens.rotary_positions_of(incoming.new_valid)
    given = given.to(own.device)
    given = given.expand(*given.shape[:-2], *own.shape)  # there may be axes before the rows
    unlike = ((given != own) & incoming.new_valid).nonzero()
    if len(unlike) and given.ndim > 2:
        raise ValueError(
            f"position_ids must be the same on every axis if {why}, but an image's tokens have "
            "several; use another policy"
        )
    if len(unlike):
        row, column = unlike[0].tolist()
        skipped = incoming.tokens.skipped
        left_out = 0 if skipped is None else int(skipped[row])
        raise ValueError(
            f"position_ids must count each row's own tokens from 0 if {why}: "
            f"{int(own[row, column]) + left_out} for a token of row {row}, got "
            f"{int(given[row, column]) + left_out}; leave position_ids out"
        )
