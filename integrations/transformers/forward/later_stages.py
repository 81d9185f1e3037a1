"""Run the stages of a prompt after the first one, once the prompt has ended; see `stage`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.chunks import Chunks, Remember
from kvpolicy.integrations.transformers.forward.facts import Call
from kvpolicy.integrations.transformers.forward.history import History
from kvpolicy.integrations.transformers.forward.inputs import Incoming
from kvpolicy.integrations.transformers.forward.narrowing import Narrowed
from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.integrations.transformers.forward.passes import KeyUse, Pass
from kvpolicy.integrations.transformers.forward.selecting import ChooseTokens, Select
from kvpolicy.integrations.transformers.forward.stage import PrefillStage, StagePiece
from kvpolicy.integrations.transformers.forward.staged_prompt import StagedPrompt
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.selection import gather_positions

Passes = Generator[Pass, PassRun, None]  # is sent the run of every pass that it yields


def stage_pass(
    call: Call,
    incoming: Incoming,
    at_queries: Remember | Select | ChooseTokens,
    piece: StagePiece,
    **more: Any,
) -> Pass:
    """Make the pass that reads some of a prompt's tokens in one range of layers.

    Args:
        call: What the forward asks for.
        incoming: The tokens.
        at_queries: What is done at their queries, which also says what becomes of their keys.
        piece: The stage, and what enters it.
        more: Further fields of `Pass`.
    """
    policy = call.model.policy
    keys = {Remember: KeyUse.APPEND, Select: KeyUse.SELECT, ChooseTokens: KeyUse.DISCARD}
    return Pass(
        incoming,
        keys[type(at_queries)],
        at_queries,
        stage=piece,
        no_columns=(
            "a prompt must come in one forward if attention counts columns, as in layer "
            f"{{index}}, and {policy} drops tokens; leave prefill_chunk_size at None"
        ),
        **more,
    )


@attrs.frozen(eq=False)
class SurvivingTokens:
    """A record of the prompt's tokens that reach a range of layers, and of their hidden states.

    Args:
        columns: ``[batch, len]`` int64, their columns in the prompt's chunks; -1 on padding.
        positions: ``[batch, len]`` int64, their positions; -1 on padding.
        parts: Hidden states ``[batch, len, hidden]`` that go into the stage, in consecutive parts.
        places: ``[batch, len]`` int64, the columns of the tokens in ``parts``.
        resumed: If the stage's first layer is resumed: its second run, and the slots of the tokens
            in it.
        history: The saliency that earlier layers gave these tokens.
    """

    columns: Tensor
    positions: Tensor
    parts: tuple[Tensor, ...] = ()
    places: Tensor | None = None
    resumed: tuple[Narrowed, Tensor] | None = None
    history: History | None = None


@attrs.frozen(eq=False)
class LaterStages:
    """A runner of the later layers for a chunked prompt, once the prompt has ended.

    Args:
        call: What the forward asks for.
        layers: The layers of the cache.
        last: The last chunk of the prompt.
        staged: All chunks of the prompt.
        whole: The tokens seen, the prompt included.
        features: Features to add to hidden states of the prompt between layers; None if there are
            none.
    """

    call: Call
    layers: list[PolicyLayer]
    last: Incoming
    staged: StagedPrompt
    whole: SeenTokens
    features: AddedFeatures | None

    def read(
        self, stage: PrefillStage, reach: SurvivingTokens, propagated: dict[int, Tensor]
    ) -> Generator[Pass, PassRun, SurvivingTokens]:
        """Yield the passes through one range of layers; return the tokens that reach the next."""
        held: list[Tensor] = []
        run = yield from self._passes(stage, reach, held, is_output=False)
        assert run.stage is not None
        assert run.stage.held is not None
        held.append(run.stage.held)
        everything = torch.arange(reach.columns.shape[1], device=reach.columns.device)
        reach = attrs.evolve(
            reach,
            parts=tuple(held),
            places=torch.where(reach.columns >= 0, everything, -1),
            resumed=None,
        )
        passed = passed_on(reach, run)
        if run.made.at_queries.passed is not None:
            propagated[stage.last] = passed.positions
        return passed

    def end(
        self, stage: PrefillStage, reach: SurvivingTokens, propagated: dict[int, Tensor]
    ) -> Passes:
        """Yield the passes through the last range of layers, which gives the decoder's output."""
        run = yield from self._passes(stage, reach, [], is_output=True)
        run.propagated.update(propagated)
        passed = run.made.at_queries.passed
        if passed is not None:  # behind the last layer
            run.propagated[stage.last] = gather_positions(reach.positions, passed)

    def _passes(
        self, stage: PrefillStage, reach: SurvivingTokens, held: list[Tensor], *, is_output: bool
    ) -> Generator[Pass, PassRun, PassRun]:
        """Yield the passes through a range of layers, piece by piece; return the last pass's run.

        ``held`` gets the hidden states that go into the next stage, of all pieces but the last.
        """
        begun = self.staged.begun
        # The tokens that layers held before the prompt, then those of the prompt read in this
        # stage.
        tokens = attrs.evolve(self.whole, appended=begun.appended, appended_ids=begun.appended_ids)
        for layer in self.layers[stage.first + (reach.resumed is not None) : stage.last + 1]:
            layer.follow(tokens)
        started = begun.lengths > 0
        chunks = Chunks(self.call.model.policy.num_queries)
        pieces, history = self._pieces(reach), reach.history
        looks = stage.looks or (is_output and self._may_look(stage.last))
        for columns in pieces[:-1]:
            positions = reach.positions[:, columns]
            tokens = attrs.evolve(tokens, appended=torch.cat([tokens.appended, positions], dim=1))
            piece = self._piece(stage, reach, columns, looks=looks, tokens=tokens, started=started)
            remember = Remember(chunks, history)
            run = yield stage_pass(
                self.call,
                self._incoming(reach, columns),
                remember,
                piece,
                missing=reach.columns.shape[1] - columns.start,
                features=self._features_of(reach, columns),
            )
            chunks = remember.chunks(run.at)
            started = started | (positions >= 0).any(dim=1)
            assert run.stage is not None
            if run.stage.held is not None and not is_output:
                held.append(run.stage.held)
        columns, looks = pieces[-1], stage.looks
        piece = self._piece(stage, reach, columns, looks=looks, tokens=self.whole, started=started)
        run = yield stage_pass(
            self.call,
            self._incoming(reach, columns),
            Select(chunks, history),
            attrs.evolve(piece, is_output=is_output, nested=not is_output),
            features=self._features_of(reach, columns),
            main=is_output,
        )
        return run

    def _features_of(self, reach: SurvivingTokens, columns: slice) -> AddedFeatures | None:
        """Return the image features of the tokens that one pass reads; None if there are none."""
        return None if self.features is None else self.features.taken(reach.columns[:, columns])

    def _may_look(self, index: int) -> bool:
        """True if a layer may be run only until its queries and keys are known."""
        return self.layers[index].plain and self.call.narrows

    def _piece(
        self,
        stage: PrefillStage,
        reach: SurvivingTokens,
        columns: slice,
        *,
        looks: bool,
        tokens: SeenTokens,
        started: Tensor,
    ) -> StagePiece:
        states = resumed = None
        if reach.parts:
            assert reach.places is not None
            states = taken_from(reach.parts, reach.places[:, columns])
        if reach.resumed is not None:
            narrowed, slots = reach.resumed
            resumed = attrs.evolve(narrowed, slots=slots[:, columns])
        return StagePiece(
            stage, looks, tokens=tokens, started=started, states=states, resumed=resumed
        )

    def _pieces(self, reach: SurvivingTokens) -> list[slice]:
        """Return the columns of tokens that each pass through a range of layers reads.

        No piece is longer than the longest chunk, and the last piece has the tokens of the last
        chunk.
        """
        lengths = [each.shape[1] for each in self.staged.valid]
        count, size = reach.columns.shape[1], max(lengths)
        own = int((reach.columns >= sum(lengths[:-1])).sum(dim=1).max())
        earlier = [slice(at, min(at + size, count - own)) for at in range(0, count - own, size)]
        return [*earlier, slice(count - own, count)]

    def _incoming(self, reach: SurvivingTokens, columns: slice) -> Incoming:
        own, last = reach.columns[:, columns], self.last
        valid = own >= 0
        arguments = dict(last.arguments)
        for name in self.staged.inputs[0].keys() - {"position_ids"}:
            arguments[name] = taken_from([each[name] for each in self.staged.inputs], own)
        arguments["position_ids"] = self._rotary(reach, columns)
        arguments["attention_mask"] = None
        if not bool(valid.all()):
            seen = valid.new_ones(valid.shape[0], last.tokens.seen)
            arguments["attention_mask"] = torch.cat([seen, valid], dim=1).long()
        return attrs.evolve(
            last,
            arguments=arguments,
            moved=None,
            new_valid=valid,
            columns=valid,
            padded=not bool(valid.all()),
            order=None,
            positions=reach.positions[:, columns],
            ids=None,
            kinds=None,
        )

    def _rotary(self, reach: SurvivingTokens, columns: slice) -> Tensor:
        """Return the rotary positions at which a pass reads its tokens, without restart gaps."""
        if self.call.model.restarts:
            return self.staged.begun.rotary_positions_of(reach.columns >= 0)[:, columns]
        given = [each["position_ids"] for each in self.staged.inputs]
        return taken_from(given, reach.columns[:, columns]).movedim((0, 1), (-2, -1))


def passed_on(reach: SurvivingTokens, run: PassRun) -> SurvivingTokens:
    """Return the tokens that go on from one range of layers to the next one."""
    length, at_end = reach.columns.shape[1], run.made.at_queries
    assert isinstance(at_end, (Select, ChooseTokens))
    assert run.stage is not None
    slots, attended = at_end.passed, run.stage.attended
    if slots is None:
        everything = torch.arange(length, device=reach.columns.device)
        slots = torch.where(reach.columns >= 0, everything, -1)
    resumed = None
    if attended is not None and reach.places is not None:
        keys, values, valid = attended
        own = torch.where(slots < 0, -1, slots + keys.shape[2] - length).to(keys.device)
        narrowed = Narrowed(keys, values, own, valid, run.call.implementation)
        resumed = narrowed, own
    places = None if reach.places is None else gather_positions(reach.places, slots)
    return attrs.evolve(
        reach,
        columns=gather_positions(reach.columns, slots),
        positions=gather_positions(reach.positions, slots),
        places=places,
        resumed=resumed,
        history=at_end.history.taken(slots),
    )


def taken_from(parts: Sequence[Tensor], columns: Tensor) -> Tensor:
    """Take the given columns from the concatenation of several tensors.

    Args:
        parts: ``[batch, len, ...]`` each; only their lengths may differ.
        columns: ``[batch, count]`` int64, columns in the concatenation of all parts; -1 gives
            zeros.

    Returns:
        ``[batch, count, ...]``.
    """
    columns = columns.to(parts[0].device)
    found = parts[0].new_zeros(*columns.shape, *parts[0].shape[2:])
    start = 0
    for part in parts:
        stop = start + part.shape[1]
        rows, places = ((columns >= start) & (columns < stop)).nonzero(as_tuple=True)
        if len(rows):
            found[rows, places] = part[rows, columns[rows, places] - start]
        start = stop
    return found
