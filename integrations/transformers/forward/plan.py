"""List the passes that a forward is made of, situation by situation; see docs/architecture.md."""

from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.arriving import check_positions
from kvpolicy.integrations.transformers.forward.chunks import Chunks, Remember
from kvpolicy.integrations.transformers.forward.decoding import Bound
from kvpolicy.integrations.transformers.forward.facts import Call, ModelFacts
from kvpolicy.integrations.transformers.forward.inputs import (
    OF_TOKENS,
    Incoming,
    mask_of,
    take_columns,
)
from kvpolicy.integrations.transformers.forward.pass_run import Passes
from kvpolicy.integrations.transformers.forward.passes import AtQueries, Pass, PassState
from kvpolicy.integrations.transformers.forward.second_reading import SecondReading
from kvpolicy.integrations.transformers.forward.selecting import ChooseTokens, Select, choose
from kvpolicy.integrations.transformers.forward.staging import StagedPrefill
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.selection import gather_positions


@attrs.frozen(eq=False)
class Arrival:
    """A forward that is about to run, with all that decides which passes it takes.

    Args:
        cache: The cache, as the decoder is given it.
        starts: Whether the policy acts on it, or at the end of the prompt that it belongs to.
        ends: Whether it ends its prompt.
        missing: Number of columns of the prompt that are still to be read, those of the forward
            included; 0 if its end is unknown.
        chunks: The chunks of the prompt before it; None if it is the first.
        remember: Called with the chunks of the prompt so far, if more of the prompt follows.
    """

    call: Call
    cache: Any
    layers: list[PolicyLayer]
    incoming: Incoming
    features: AddedFeatures | None
    starts: bool
    ends: bool
    missing: int
    chunks: Chunks | None
    remember: Callable[[Chunks], None]

    def passes(self) -> Passes:
        """Yield the passes of a forward in order; the main one is the model's own call.

        The caller sends the run of each pass, once it has ended.
        """
        if not self.starts:
            return self._append()
        if self.chunks is None and self.ends:
            return self._restarted() if self.call.model.restarts else self._prompt(self.incoming)
        if self.call.model.acting:
            return self._staged()
        return self._prompt(self.incoming) if self.ends else self._chunk()

    def _append(self) -> Passes:
        queries = AtQueries() if self.call.model.policy.decoding is None else Bound()
        yield Pass(self.incoming, queries, in_prompt=False, main=True)

    def _prompt(
        self,
        incoming: Incoming,
        features: AddedFeatures | None = None,
        propagated: dict[int, Tensor] | None = None,
    ) -> Passes:
        select = Select(self.chunks)
        run = yield Pass(
            incoming,
            select,
            main=True,
            narrows=not self.call.model.restarts,
            features=self.features if features is None else features,
            propagated=propagated or {},
        )
        if not select.waiting:
            return
        policy, waiting = self.call.model.policy, select.waiting
        if policy.rereading is not None:
            reading, parts = policy.rereading, self.call.model.parts
            again = SecondReading(reading, parts, self.layers, waiting, run.tokens, self.cache)
            waiting = yield from again.passes()
        choose(policy, self.layers, waiting)

    def _restarted(self) -> Passes:
        """Yield a pass that chooses tokens inside a layer, storing nothing, and one to read them.

        They are read at rotary positions without gaps; their original positions do not change.
        `SeenTokens.skipped` counts the tokens that restarts left out.
        """
        first = choosing_pass(self.call.model, self.incoming, self.features)
        run = yield first
        chosen, features = first.at_queries.passed, self.features
        incoming, propagated = chosen_tokens(self.incoming, chosen, run.at), dict[int, Tensor]()
        assert incoming.skipped is not None
        assert incoming.positions is not None
        if bool(incoming.skipped.any()):
            (layer,) = self.call.model.acting
            propagated[layer] = incoming.positions
        if features is not None and chosen is not None:
            features = features.taken(chosen)
        del run, first
        yield from self._prompt(incoming, features, propagated)

    def _chunk(self) -> Passes:
        remember = Remember(self.chunks or Chunks(self.call.model.policy.num_queries))
        run = yield Pass(
            self.incoming, remember, main=True, missing=self.missing, features=self.features
        )
        remember.settle()
        self.remember(remember.chunks(run.at))

    def _staged(self) -> Passes:
        prefill = StagedPrefill(
            self.call, self.layers, self.incoming, self.features, self.chunks, self.missing
        )
        if not self.ends:
            self.remember((yield from prefill.chunk()))
        elif waiting := (yield from prefill.end()):
            choose(self.call.model.policy, self.layers, waiting)


def choosing_pass(model: ModelFacts, incoming: Incoming, features: AddedFeatures | None) -> Pass:
    """Make the first pass of a restart, which ends once the filter layer's queries are known."""
    check_positions(model.policy, incoming)
    (layer,) = model.acting
    propagation = model.policy.propagation
    return Pass(
        incoming,
        ChooseTokens(layer),
        ends_inside=layer,
        features=features,
        no_later=(
            f"no token may see a later one if {propagation} restarts the prefill, but the model's "
            "mask lets the tokens of an image see each other; use a policy that does not restart"
        ),
        no_columns=(
            f"attention must use position_ids if {propagation} restarts the prefill at new "
            "positions, but that of layer {index} counts columns; use a policy that does not "
            "restart"
        ),
    )


def chosen_tokens(incoming: Incoming, chosen: Tensor | None, at: PassState) -> Incoming:
    """Return the chosen tokens as the second pass's input, at rotary positions without gaps.

    ``chosen`` are slots ``[batch, count]`` of the first pass, which is ``at``; None for all tokens.
    """
    slots = at.reach.everything() if chosen is None else chosen
    valid, tokens, arguments = slots >= 0, incoming.tokens, dict(incoming.arguments)
    for name in set(OF_TOKENS) & arguments.keys():
        if arguments[name] is not None:
            arguments[name] = take_columns(arguments[name], slots)
    arguments["position_ids"] = tokens.rotary_positions_of(valid)
    arguments["attention_mask"] = mask_of(tokens, valid)
    return attrs.evolve(
        incoming,
        arguments=arguments,
        new_valid=valid,
        positions=gather_positions(at.reach.positions, slots),
        skipped=at.reach.valid.sum(dim=1) - valid.sum(dim=1),
        order=None,
    )
