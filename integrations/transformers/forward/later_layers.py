"""Run the layers behind a drop for a prompt in chunks, once the prompt has ended; see `stage`.

Each layer reads the tokens that reach it in pieces no longer than the chunks were, before the next
layer begins. The decoder is asked once for each piece what it gives its layers for these tokens.
Only the hidden states come from the stage before.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.blocks import Narrowed
from kvpolicy.integrations.transformers.forward.chunks import Chunks, Remember
from kvpolicy.integrations.transformers.forward.facts import Call
from kvpolicy.integrations.transformers.forward.inputs import Incoming
from kvpolicy.integrations.transformers.forward.layer_contexts import History
from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.integrations.transformers.forward.passes import Pass
from kvpolicy.integrations.transformers.forward.selecting import ChooseTokens, DeferredKV, Select
from kvpolicy.integrations.transformers.forward.stage import PrefillStage, StagedPrompt, StagePiece
from kvpolicy.integrations.transformers.model.attachment import AroundLayer
from kvpolicy.integrations.transformers.state.layers import follow
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.selection import gather_positions


@attrs.frozen(eq=False)
class SurvivingTokens:
    """A record of the prompt's tokens that reach a range of layers, and of their hidden states.

    Args:
        columns: ``[batch, len]`` int64, their columns in the prompt's chunks; -1 on padding.
        positions: ``[batch, len]`` int64, their positions; -1 on padding.
        parts: Hidden states ``[batch, len, hidden]`` that go into the stage, in consecutive parts.
        places: ``[batch, len]`` int64, the columns of the tokens in ``parts``.
        resumed: The second run of the stage's first layer, if this is resumed.
        history: The saliency that earlier layers gave these tokens.
    """

    columns: Tensor
    positions: Tensor
    parts: tuple[Tensor, ...] = ()
    places: Tensor | None = None
    resumed: Narrowed | None = None
    history: History | None = None


class LaterLayers:
    """The layers behind a drop, or all layers after a restart, while they read a prompt in pieces.

    Args:
        main: The run that the decoder's layers are called with.
        whole: The tokens seen, the prompt included.
        reach: The tokens that reach the first stage.

    Attributes:
        waiting: The layers that choose when all layers were scored, by index.
        propagated: For each layer that dropped tokens, the positions it passed on.
    """

    def __init__(
        self,
        main: PassRun,
        last: Incoming,
        staged: StagedPrompt,
        whole: SeenTokens,
        stages: Sequence[PrefillStage],
        reach: SurvivingTokens,
        propagated: dict[int, Tensor],
    ) -> None:
        self._call, self._layers = main.call, main.layers
        self._last, self._staged, self._whole, self._others = last, staged, whole, stages
        self._features = AddedFeatures.joined(staged.features, staged.valid)
        self.waiting: dict[int, DeferredKV] = {}
        self.propagated = propagated
        self._begin(main, reach)

    def _begin(self, main: PassRun, reach: SurvivingTokens) -> None:
        """Prepare the runs of all pieces of the next stage."""
        self._stage, *self._others = self._others
        self._columns = pieces_of(self._staged, reach)
        self._runs = self._runs_of(self._stage, reach)
        self._states = [
            None if reach.places is None else taken_from(reach.parts, reach.places[:, columns])
            for columns in self._columns
        ]
        for run in self._runs:
            main.part = run
            self._call.model.parts.decoder.forward(**run.made.incoming.arguments)
        main.part = None
        self._reach = attrs.evolve(reach, parts=())

    def layer(self, main: PassRun, around: AroundLayer) -> Any:
        """Run a layer for all pieces of its stage; return its output for the last piece."""
        output: Any = None
        index = around.index
        resumes = self._reach.resumed is not None and index == self._stage.first
        for at, run in enumerate(self._runs):
            main.part = run
            entering, kwargs = run.given.pop(index)
            hidden = self._states[at]
            hidden = entering if hidden is None else hidden
            output = run.run_layer(around, hidden, kwargs)
            self._states[at] = output[0] if isinstance(output, tuple) else output
            if isinstance(run.made.at_queries, Remember) and not resumes:
                follow([self._layers[index]], run.tokens)
                run.made.at_queries.settle(index)
        main.part = None
        if index == self._stage.last and self._others:
            self._go_on(main)
            if self._stage.first == index:  # it has ended inside this layer
                return self.layer(main, around)
        return output

    def _go_on(self, main: PassRun) -> None:
        """Begin the next stage with the tokens that the last layer passes on."""
        run, reach = self._runs[-1], self._reach
        everything = torch.arange(reach.columns.shape[1], device=reach.columns.device)
        reach = attrs.evolve(
            reach,
            parts=tuple(each.held for each in self._runs if each.held is not None),
            places=torch.where(reach.columns >= 0, everything, -1),
            resumed=None,
        )
        passed = passed_on(reach, run)
        if run.made.at_queries.passed is not None:
            self.propagated[self._stage.last] = passed.positions
        self._end_runs()
        self._begin(main, passed)

    def _end_runs(self) -> SeenTokens:
        for run in self._runs[:-1]:
            run.finish()
        tokens, select = self._runs[-1].finish(), self._runs[-1].made.at_queries
        assert isinstance(select, Select)
        self.waiting |= select.waiting
        return tokens

    def finish(self) -> SeenTokens:
        """End the last stage; return the new record of seen tokens; see `PassRun.finish`."""
        tokens, passed = self._end_runs(), self._runs[-1].made.at_queries.passed
        if passed is not None:  # behind the last layer
            last = gather_positions(self._reach.positions, passed)
            self.propagated[self._stage.last] = last
        return tokens

    def _runs_of(self, stage: PrefillStage, reach: SurvivingTokens) -> list[PassRun]:
        """Make the runs of a stage, one for each piece of the tokens that reach it."""
        begun, history = self._staged.begun, reach.history
        # The tokens that layers held before the prompt, then those of the prompt read in this
        # stage.
        tokens = attrs.evolve(self._whole, appended=begun.appended, appended_ids=begun.appended_ids)
        follow(self._layers[stage.first + (reach.resumed is not None) : stage.last + 1], tokens)
        started, is_output = begun.lengths > 0, not self._others
        narrows = self._layers[stage.last].plain and self._call.narrows
        looks = stage.looks or (is_output and narrows)  # until queries and keys are known
        chunks, runs = Chunks(self._call.model.policy.num_queries), []
        for columns in self._columns[:-1]:
            positions = reach.positions[:, columns]
            tokens = attrs.evolve(tokens, appended=torch.cat([tokens.appended, positions], dim=1))
            piece = StagePiece(stage, looks, tokens=tokens, started=started)
            remember = Remember(chunks, history)
            missing = reach.columns.shape[1] - columns.start
            runs.append(self._run(reach, columns, remember, piece, missing=missing))
            chunks = remember.chunks(runs[-1].at)
            started = started | (positions >= 0).any(dim=1)
        piece = StagePiece(
            stage, stage.looks, is_output=is_output, tokens=self._whole, started=started
        )
        select = Select(chunks, history)
        return [*runs, self._run(reach, self._columns[-1], select, piece)]

    def _run(
        self,
        reach: SurvivingTokens,
        columns: slice,
        at_queries: Remember | Select,
        piece: StagePiece,
        **more: Any,
    ) -> PassRun:
        if reach.resumed is not None:
            resumed = attrs.evolve(reach.resumed, slots=reach.resumed.slots[:, columns])
            piece = attrs.evolve(piece, resumed=resumed)
        features = self._features
        if features is not None:
            features = features.taken(reach.columns[:, columns])
        incoming = incoming_of(self._call, self._last, self._staged, reach, columns)
        made = Pass(incoming, at_queries, stage=piece, features=features, **more)
        return PassRun(self._call, self._layers, made)


def pieces_of(staged: StagedPrompt, reach: SurvivingTokens) -> list[slice]:
    """Return the columns of the pieces in which surviving tokens are read by a range of layers.

    No piece is longer than the longest chunk, and the last piece has the tokens of the last chunk.
    """
    lengths = [each.shape[1] for each in staged.valid]
    count, size = reach.columns.shape[1], max(lengths)
    own = int((reach.columns >= sum(lengths[:-1])).sum(dim=1).max())
    earlier = [slice(at, min(at + size, count - own)) for at in range(0, count - own, size)]
    return [*earlier, slice(count - own, count)]


def incoming_of(
    call: Call, last: Incoming, staged: StagedPrompt, reach: SurvivingTokens, columns: slice
) -> Incoming:
    """Return a piece of a prompt's surviving tokens as the decoder's input."""
    own = reach.columns[:, columns]
    valid = own >= 0
    padded, arguments = not bool(valid.all()), dict(last.arguments)
    for name in staged.inputs[0].keys() - {"position_ids"}:
        arguments[name] = taken_from([each[name] for each in staged.inputs], own)
    if call.model.restarts:  # at rotary positions without gaps
        rotary = staged.begun.rotary_positions_of(reach.columns >= 0)[:, columns]
    else:
        given = [each["position_ids"] for each in staged.inputs]
        rotary = taken_from(given, own).movedim((0, 1), (-2, -1))
    arguments |= {"position_ids": rotary, "attention_mask": None}
    if padded:
        seen = valid.new_ones(valid.shape[0], last.tokens.seen)
        arguments["attention_mask"] = torch.cat([seen, valid], dim=1).long()
    return attrs.evolve(
        last,
        arguments=arguments,
        moved=None,
        new_valid=valid,
        columns=valid,
        padded=padded,
        order=None,
        positions=reach.positions[:, columns],
        ids=None,
        kinds=None,
    )


def passed_on(reach: SurvivingTokens, run: PassRun) -> SurvivingTokens:
    """Return the tokens that go on from one range of layers to the next one."""
    length, at_end = reach.columns.shape[1], run.made.at_queries
    assert isinstance(at_end, (Select, ChooseTokens))
    slots, attended = at_end.passed, run.attended
    if slots is None:
        everything = torch.arange(length, device=reach.columns.device)
        slots = torch.where(reach.columns >= 0, everything, -1)
    resumed = None
    if attended is not None and reach.places is not None:
        keys, values, valid = attended
        own = torch.where(slots < 0, -1, slots + keys.shape[2] - length).to(keys.device)
        resumed = Narrowed(keys, values, own, valid, run.call.implementation)
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
    """Take the columns ``[batch, count]`` from the concatenation of several tensors.

    The tensors are ``[batch, len, ...]``; -1 gives zeros.
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
