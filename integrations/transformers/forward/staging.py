"""Read a prompt in chunks of which tokens are dropped: all passes of its stages.

Each stage reads the tokens that the previous one passes on, in pieces no longer than the chunks
were. The decoder gets the ids and positions of these tokens, so that all arguments of its layers
belong to them. Only the hidden states come from the previous stage.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.chunks import Chunks, Remember
from kvpolicy.integrations.transformers.forward.facts import Call
from kvpolicy.integrations.transformers.forward.history import History
from kvpolicy.integrations.transformers.forward.inputs import OF_TOKENS, Incoming
from kvpolicy.integrations.transformers.forward.narrowing import Narrowed, few_go_on
from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.integrations.transformers.forward.passes import KeyUse, Pass
from kvpolicy.integrations.transformers.forward.restart import check_positions
from kvpolicy.integrations.transformers.forward.selecting import ChooseTokens, Select
from kvpolicy.integrations.transformers.forward.stage import PrefillStage, StagePiece, stages_of
from kvpolicy.integrations.transformers.forward.staged_prompt import StagedPrompt
from kvpolicy.integrations.transformers.model.call_arguments import signature
from kvpolicy.integrations.transformers.state.cross import CrossLayer
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer, held_by, hold_again
from kvpolicy.integrations.transformers.state.recurrent import (
    EmptyLayer,
    RecurrentLayer,
    SharedLayer,
    SideBySideLayer,
)
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.selection import gather_positions

Passes = Generator[Pass, PassRun, None]  # is sent the run of every pass that it yields

_KINDS = (PolicyLayer, RecurrentLayer, EmptyLayer)


def _why_whole(layer: PolicyLayer) -> str | None:
    """Return why a layer cannot be left out and resumed; None if it can."""
    kinds: dict[type[PolicyLayer], str] = {
        SharedLayer: "borrows keys of another",
        IndexedLayer: "has an indexer",
        CrossLayer: "attends to images",
        SideBySideLayer: "holds a state beside its keys",
    }
    for kind, why in kinds.items():
        if isinstance(layer, kind):
            return why
    if type(layer) not in _KINDS:
        return "is of a kind of its own"
    return "shows no queries" if layer.attends and not layer.facts.shows_queries else None


@attrs.frozen(eq=False)
class _SurvivingTokens:
    """A record of the tokens that reach a stage, each row's padding before its tokens.

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
class StagedPrefill:
    """A prefill in chunks, of a prompt of which tokens are dropped.

    Args:
        call: What the forward asks for.
        layers: The layers of the cache.
        incoming: The current chunk.
        features: Features to add to the chunk's hidden states between layers; None if there are
            none.
    """

    call: Call
    layers: list[PolicyLayer]
    incoming: Incoming
    features: AddedFeatures | None = None

    @property
    def _restarts(self) -> bool:
        return self.call.model.restarts

    def begun(self, missing: int) -> Chunks:
        """Return the record of a prompt of which no chunk was read.

        Args:
            missing: Number of columns of the prompt.
        """
        self._check()
        stages = self._stages(missing)
        staged = StagedPrompt(stages, self.incoming.tokens, held_by(self.layers))
        return Chunks(self.call.model.policy.num_queries, staged=staged)

    def chunk(self, chunks: Chunks, missing: int) -> Pass:
        """Return the pass over a chunk that does not end the prompt.

        Args:
            chunks: The chunks before it.
            missing: Number of columns of the prompt that are still to be read, this chunk included.
        """
        self._check()
        staged = chunks.staged
        assert staged is not None
        self._inputs(staged)
        stage = staged.stages[0]
        piece = StagePiece(stage, stage.looks, nested=False, begun=staged.begun)
        return self._pass(
            self.incoming,
            Remember(chunks, only=frozenset({stage.last}) if self._restarts else None),
            piece,
            missing=missing,
            features=self.features,
            main=True,
        )

    def with_chunk(self, chunks: Chunks, run: PassRun) -> Chunks:
        """Add the chunk to those that were read.

        Args:
            chunks: All chunks so far, this one included, but for its part in ``staged``.
            run: The pass over it.
        """
        staged = chunks.staged
        assert staged is not None
        assert run.stage is not None
        held = None if self._restarts else run.stage.held
        valid = self.incoming.new_valid
        staged = staged.with_chunk(valid, self._inputs(staged), held, self.features)
        return attrs.evolve(chunks, staged=staged)

    def end(self, chunks: Chunks) -> Passes:
        """Yield the passes of the end of the prompt, the last chunk included.

        Args:
            chunks: The chunks before the last.
        """
        staged, incoming = chunks.staged, self.incoming
        assert staged is not None
        self._check()
        self._inputs(staged)
        first, *others = staged.stages
        piece = StagePiece(first, first.looks, is_output=not others, nested=bool(others))
        at_end = ChooseTokens(first.last, chunks) if self._restarts else Select(chunks)
        run = yield self._pass(incoming, at_end, piece, features=self.features, main=not others)
        if not others:
            if at_end.passed is not None:  # behind the last layer
                prompt = staged.begun.positions_of(chunks.prompt_valid(incoming.new_valid))
                run.propagated[first.last] = gather_positions(prompt, at_end.passed)
            return
        staged = self.with_chunk(chunks, run).staged
        assert staged is not None
        whole, begun = run.tokens, staged.begun
        valid = torch.cat(staged.valid, dim=1)
        order = valid.to(torch.uint8).argsort(dim=1, stable=True)  # padding first
        valid = valid.gather(1, order)
        reach = _SurvivingTokens(
            order.masked_fill(~valid, -1), begun.positions_of(valid), staged.states, order
        )
        reach = _passed_on(reach, run)
        propagated: dict[int, Tensor] = {}
        if valid.shape != reach.columns.shape or not torch.equal(valid, reach.columns >= 0):
            propagated[first.last] = reach.positions
        if self._restarts:
            hold_again(self.layers, staged.before)
            skipped = valid.sum(dim=1) - (reach.columns >= 0).sum(dim=1)
            before = 0 if whole.skipped is None else whole.skipped
            whole = attrs.evolve(whole, skipped=before + skipped)
            reach = attrs.evolve(reach, parts=(), places=None, resumed=None, history=None)
        del run, at_end, valid, order
        reader = _Stages(self, staged, whole, AddedFeatures.joined(staged.features, staged.valid))
        for stage in others[:-1]:
            reach = yield from reader.read(stage, reach, propagated)
        yield from reader.end(others[-1], reach, propagated)

    def _pass(
        self,
        incoming: Incoming,
        at_queries: Remember | Select | ChooseTokens,
        piece: StagePiece,
        **more: Any,
    ) -> Pass:
        policy = self.call.model.policy
        keys = {Remember: KeyUse.APPEND, Select: KeyUse.SELECT, ChooseTokens: KeyUse.DISCARD}
        return Pass(
            incoming,
            keys[type(at_queries)],
            at_queries,
            stage=piece,
            no_columns=(
                "a prompt must come in one forward where attention counts columns, as that of "
                f"layer {{index}}, and {policy} drops tokens; leave prefill_chunk_size at None"
            ),
            **more,
        )

    def _stages(self, prompt_len: int) -> tuple[PrefillStage, ...]:
        model, num_layers = self.call.model, len(self.layers)
        seen = int(self.incoming.tokens.lengths.max()) + prompt_len

        def narrows(index: int) -> bool:
            plain = type(self.layers[index]) is PolicyLayer
            plain = plain and self.layers[index].facts.shows_queries
            if not (plain and self.call.narrows) or model.windows[index] is not None:
                return False
            return few_go_on(model.policy.propagation, index, num_layers, seen, prompt_len)

        return stages_of(model.policy, num_layers, narrows)

    def _check(self) -> None:
        """Check that the prompt may be read in chunks.

        Raises:
            UnsupportedModelError: The model has layers that cannot be left out and resumed, makes
                masks outside of its decoder, takes no position ids, or gives its output the shape
                of its input.
            UnsupportedGenerationError: Hidden states or attention weights are asked for.
        """
        remedy = f"and {self.call.model.policy} drops tokens; leave prefill_chunk_size at None"
        for index, layer in enumerate(self.layers):
            if (why := _why_whole(layer)) is not None:
                raise UnsupportedModelError(
                    f"a prompt must come in one forward where a layer {why}, as layer {index} "
                    f"does, {remedy}"
                )
        takes = "position_ids" in signature(type(self.call.model.parts.decoder).forward).parameters
        reasons = {
            "takes no position_ids": not takes,
            "gets its masks from the model around it": self.call.own_masks,
            "gives its output the shape of its input": self.call.model.quirks.refills,
        }
        for why, holds in reasons.items():
            if holds:
                raise UnsupportedModelError(
                    f"a prompt must come in one forward where the decoder {why}, {remedy}"
                )
        if self.call.attended is not None or self.call.records:
            raise UnsupportedGenerationError(
                "output_attentions and output_hidden_states must be False where a prompt comes in "
                f"chunks {remedy}, since which tokens they are of is known at its end"
            )

    def _inputs(self, staged: StagedPrompt) -> dict[str, Tensor]:
        """Return the decoder's inputs for a chunk's tokens; see `StagedPrompt`.

        Raises:
            ValueError: See `check_positions`.
            UnsupportedGenerationError: Earlier chunks were ids and this one is embeddings, or the
                reverse.
        """
        incoming, policy = self.incoming, self.call.model.policy
        if self._restarts:
            check_positions(policy, incoming)
        arguments = incoming.arguments
        inputs = {
            name: arguments[name] for name in OF_TOKENS if isinstance(arguments.get(name), Tensor)
        }
        if staged.inputs and inputs.keys() != staged.inputs[0].keys() - {"position_ids"}:
            before = ", ".join(sorted(staged.inputs[0].keys() - {"position_ids"}))
            raise UnsupportedGenerationError(
                "chunks of a prompt must be given as all input_ids or all inputs_embeds where "
                f"{policy} drops tokens, got {', '.join(sorted(inputs))} behind {before}"
            )
        positions = arguments.get("position_ids")
        if positions is None:
            positions = incoming.tokens.rotary_positions_of(incoming.new_valid)
        batch = incoming.new_valid.shape[0]
        positions = positions.expand(*positions.shape[:-2], batch, -1)
        return {**inputs, "position_ids": positions.movedim((-2, -1), (0, 1))}


@attrs.frozen(eq=False)
class _Stages:
    """A reader of the stages of a prompt that has ended.

    Args:
        prefill: The prefill.
        staged: All chunks of the prompt.
        whole: The tokens seen, the prompt included.
        features: Features to add to hidden states of the prompt between layers; None if there are
            none.
    """

    prefill: StagedPrefill
    staged: StagedPrompt
    whole: SeenTokens
    features: AddedFeatures | None

    def read(
        self, stage: PrefillStage, reach: _SurvivingTokens, propagated: dict[int, Tensor]
    ) -> Generator[Pass, PassRun, _SurvivingTokens]:
        """Yield the passes of a stage; return the tokens that reach the next one."""
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
        passed = _passed_on(reach, run)
        if run.made.at_queries.passed is not None:
            propagated[stage.last] = passed.positions
        return passed

    def end(
        self, stage: PrefillStage, reach: _SurvivingTokens, propagated: dict[int, Tensor]
    ) -> Passes:
        """Yield the passes of the last stage, whose output is that of the decoder."""
        run = yield from self._passes(stage, reach, [], is_output=True)
        run.propagated.update(propagated)
        passed = run.made.at_queries.passed
        if passed is not None:  # behind the last layer
            run.propagated[stage.last] = gather_positions(reach.positions, passed)

    def _passes(
        self, stage: PrefillStage, reach: _SurvivingTokens, held: list[Tensor], *, is_output: bool
    ) -> Generator[Pass, PassRun, PassRun]:
        """Yield the passes of a stage, piece by piece; return the run of the last.

        ``held`` gets the hidden states that go into the next stage, of all pieces but the last.
        """
        prefill, begun = self.prefill, self.staged.begun
        # The tokens that layers held before the prompt, then those of the prompt read in this
        # stage.
        tokens = attrs.evolve(self.whole, appended=begun.appended, appended_ids=begun.appended_ids)
        for layer in prefill.layers[stage.first + (reach.resumed is not None) : stage.last + 1]:
            layer.follow(tokens)
        started = begun.lengths > 0
        chunks = Chunks(prefill.call.model.policy.num_queries)
        pieces, history = self._pieces(reach), reach.history
        looks = stage.looks or (is_output and self._may_look(stage.last))
        for columns in pieces[:-1]:
            positions = reach.positions[:, columns]
            tokens = attrs.evolve(tokens, appended=torch.cat([tokens.appended, positions], dim=1))
            piece = self._piece(stage, reach, columns, looks=looks, tokens=tokens, started=started)
            remember = Remember(chunks, history)
            run = yield prefill._pass(
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
        run = yield prefill._pass(
            self._incoming(reach, columns),
            Select(chunks, history),
            attrs.evolve(piece, is_output=is_output, nested=not is_output),
            features=self._features_of(reach, columns),
            main=is_output,
        )
        return run

    def _features_of(self, reach: _SurvivingTokens, columns: slice) -> AddedFeatures | None:
        """Return the features for some of the tokens that reach a stage."""
        return None if self.features is None else self.features.taken(reach.columns[:, columns])

    def _may_look(self, index: int) -> bool:
        """True if it is allowed to compute only the queries and keys of a layer."""
        return type(self.prefill.layers[index]) is PolicyLayer and self.prefill.call.narrows

    def _piece(
        self,
        stage: PrefillStage,
        reach: _SurvivingTokens,
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

    def _pieces(self, reach: _SurvivingTokens) -> list[slice]:
        """Return the columns of each piece.

        No piece is longer than the longest chunk, and the last piece has the tokens of the last
        chunk.
        """
        lengths = [each.shape[1] for each in self.staged.valid]
        count, size = reach.columns.shape[1], max(lengths)
        own = int((reach.columns >= sum(lengths[:-1])).sum(dim=1).max())
        earlier = [slice(at, min(at + size, count - own)) for at in range(0, count - own, size)]
        return [*earlier, slice(count - own, count)]

    def _incoming(self, reach: _SurvivingTokens, columns: slice) -> Incoming:
        own, last = reach.columns[:, columns], self.prefill.incoming
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

    def _rotary(self, reach: _SurvivingTokens, columns: slice) -> Tensor:
        """Return the positions at which tokens are read, without gaps after a restart."""
        if self.prefill._restarts:
            return self.staged.begun.rotary_positions_of(reach.columns >= 0)[:, columns]
        given = [each["position_ids"] for each in self.staged.inputs]
        return taken_from(given, reach.columns[:, columns]).movedim((0, 1), (-2, -1))


def _passed_on(reach: _SurvivingTokens, run: PassRun) -> _SurvivingTokens:
    """Return the tokens of a stage that reach the next one, given the run that ended the stage."""
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
    """Take some columns from consecutive tensors.

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
