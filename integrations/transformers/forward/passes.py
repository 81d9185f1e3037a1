"""Define a pass: one run of the decoder over some tokens, and what is done in its layers.

`plan` lists the passes of a forward, and `pass_run` runs one of them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.facts import Call
from kvpolicy.integrations.transformers.forward.inputs import Incoming
from kvpolicy.integrations.transformers.forward.layer_masks import LayerMasks
from kvpolicy.integrations.transformers.forward.reaching import ReachingTokens
from kvpolicy.integrations.transformers.forward.stage import StagePiece
from kvpolicy.integrations.transformers.model.rotary import Gapless, GivenPlaces
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens

# The keys and values that the cache hands out to a layer.
Stored = tuple[Tensor, Tensor]


class KeyUse(enum.Enum):
    """What a pass does with the keys and values it computes: append, select or discard."""

    APPEND = "append"  # layers hold them behind what they kept
    SELECT = "select"  # layers choose among them and what they hold
    DISCARD = "discard"  # layers hold what they held before the pass


class PassEnded(Exception):  # noqa: N818 -- not an error: it ends a run early
    """A signal, raised as an exception, that ends a layer's or decoder's run early."""


class PassState:
    """The tokens of a running pass, and which of them reach the current layer.

    Attributes:
        tokens: The tokens seen, those of the pass included.
        first: Whether nothing was read before the pass.
        reach: The tokens that reach the current layer.
        last_hidden: ``[batch, hidden]``, the last layer's output for the last token; None before.
        started: ``[batch]`` bool, rows in which layers have read tokens before.
        prompt_end: Number of columns seen at the end of the prompt, if the pass belongs to one.
    """

    def __init__(self, call: Call, layers: list[PolicyLayer], made: Pass) -> None:
        self.call, self.layers = call, layers
        self.last_hidden: Tensor | None = None
        self.policy = call.model.policy
        incoming, stage = made.incoming, made.stage
        self.before = incoming.tokens
        padded = incoming.tokens.padded or incoming.padded
        self.reach = ReachingTokens(incoming, padded=padded, counts_held=stage is None)
        later = None if stage is None else stage.tokens
        if later is None:
            tokens = incoming.tokens.extended(
                self.reach.positions,
                incoming.columns,
                ids=incoming.ids,
                padded=incoming.padded,
                acts=made.at_queries.keys is not KeyUse.APPEND,
                skipped=incoming.skipped,
                kinds=incoming.kinds,
                places=_given_places(call, incoming),
                bounded=made.at_queries.bounded,
            )
        else:
            tokens = later
            self.reach.padded = self.reach.padded or bool((later.appended < 0).any())
        self.tokens = tokens
        self.prompt_end = tokens.seen if later is not None else self.before.seen + made.missing
        self.first = incoming.tokens.seen == 0 and later is None
        self.started = incoming.tokens.lengths > 0
        if stage is not None and stage.started is not None:
            self.started = stage.started
        self.masks = LayerMasks(
            call,
            layers,
            self.reach,
            incoming,
            tokens,
            first=self.first,
            in_prompt=made.in_prompt,
            padding_first=made.at_queries.padding_first,
        )
        # Where tokens are read; None if at their original positions.
        self.read_at: Gapless | GivenPlaces | None = tokens.given_places
        if incoming.skipped is not None:
            self.read_at = Gapless(self.reach.positions, incoming.tokens.lengths)

    @functools.cached_property
    def seen_len(self) -> tuple[int, ...]:
        """The number of tokens seen in each row, the current pass's tokens included."""
        return tuple(self.tokens.lengths.tolist())


def _given_places(call: Call, incoming: Incoming) -> Tensor | None:
    """Return the position ids ``[axes, batch or 1, new_len]`` if parts of the policy ask for them.

    A token alone follows those before it.
    """
    ids: Tensor | None = incoming.arguments.get("position_ids")
    if call.probe is None or not call.probe.reads_places or ids is None or ids.shape[-1] == 1:
        return None
    return ids[None] if ids.ndim == 2 else ids[-3:]  # an axis before them counts tokens


class AtQueries:
    """A base class for what a pass does at each layer with the layer's queries and keys.

    By itself it does nothing but append the new keys and values. Its subclasses are `Remember`,
    `Select`, `ChooseTokens`, `ScoreChunk` and `Bound`.

    Attributes:
        keys: What becomes of the keys and values that the pass makes.
        asks: Whether parts of the policy look at layers, now or at the end of the prompt.
        bounded: Whether the tokens of the pass belong to a bounded answer.
        padding_first: Whether keys are to be shown with each row's padding before its tokens.
        passed: ``[batch, passed_len]`` int64, the slots of the tokens that the layer seen last
            passes on; None for all.
        holding_anew: The layers that hold other slots once observed, and so need not append.
    """

    keys = KeyUse.APPEND
    holding_anew: frozenset[int] = frozenset()
    asks = False
    bounded = False
    padding_first = False
    passed: Tensor | None = None

    def begin(self, at: PassState) -> None:
        """Prepare for a pass, before the decoder's first layer runs."""

    def waits(self) -> bool:
        """True if `observe` must be called in a pass that only appends keys."""
        return False

    def left_alone(self, at: PassState) -> frozenset[int]:
        """Return the layers at which an unpadded first prompt needs nothing but `observe`.

        All tokens reach them, and they pass on all. The first and the last layer are never among
        them.
        """
        return frozenset()

    def observe(self, at: PassState, index: int, inputs: AttentionInputs, stored: Stored) -> None:
        """Use what the attention of one layer gets, for example to choose the tokens to keep."""

    def drop(self, slots: Tensor) -> None:
        """Note that a layer drops all tokens except ``slots`` ``[batch, count]``."""

    def finish(self, at: PassState) -> SeenTokens:
        """End a pass after its last layer; return the record of seen tokens."""
        return at.tokens


@attrs.frozen(eq=False)
class Pass:
    """A plan for one run of the decoder: its tokens, and what to do with their keys.

    Args:
        at_queries: What is done in a layer, once its queries and keys are known, and what becomes
            of its keys.
        in_prompt: Whether its tokens belong to a prompt.
        main: Whether it is the run that the model itself has called; the cache calls all others.
        narrows: Whether layers that pass on few tokens may be run for these only. Otherwise only
            the last layer may, for the tokens whose outputs are asked for.
        ends_inside: Index of a layer; the pass ends once the queries of that layer are known.
        stage: The layers it is for, and where hidden states enter; None for all layers.
        missing: Number of columns of a prompt in chunks that are still to be read, those of the
            pass included; 0 if the number is unknown.
        layers: The layers that it reads, in place of the cache's own; None for these.
        no_later: Why no token may see a later one; empty if it may.
        no_columns: Why attention may not count columns; empty if it may.
        propagated: Positions of the tokens that layers have passed on before the pass, by layer.
        then: Makes what runs the layers behind the stage, once the stage has ended; None if these
            wait for more of the prompt.
        around: Runs each layer in place of the pass; None if the pass does. See `PassRun.layer`.
    """

    incoming: Incoming
    at_queries: AtQueries
    in_prompt: bool = True
    main: bool = False
    narrows: bool = False
    ends_inside: int | None = None
    stage: StagePiece | None = None
    missing: int = 0
    features: AddedFeatures | None = None
    layers: list[PolicyLayer] | None = None
    no_later: str = ""
    no_columns: str = ""
    propagated: dict[int, Tensor] = attrs.field(factory=dict)
    then: Callable[[Any], Any] | None = None
    around: Callable[..., Any] | None = None
