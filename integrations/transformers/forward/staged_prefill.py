"""Read all stages but the first at the end of a chunked prompt of which tokens are dropped.

Each stage reads the tokens that the previous one passes on, in pieces no longer than the chunks
were. The decoder gets the ids and positions of these tokens, so that all arguments of its layers
belong to them. Only the hidden states come from the previous stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.chunked_prefill import Chunks
from kvpolicy.integrations.transformers.forward.history import History
from kvpolicy.integrations.transformers.forward.inputs import OF_TOKENS, Incoming
from kvpolicy.integrations.transformers.forward.narrowing import LARGEST_SHARE, Narrowed
from kvpolicy.integrations.transformers.forward.restart import check_positions
from kvpolicy.integrations.transformers.forward.staged_prompt import PrefillStage, StagedPrompt
from kvpolicy.integrations.transformers.forward.stages import (
    StageChunk,
    StageEnd,
    StageForward,
    StageInput,
    StageRead,
    stages_of,
    taken_from,
)
from kvpolicy.integrations.transformers.model.call_arguments import signature
from kvpolicy.integrations.transformers.state.cross import CrossLayer
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.recurrent import (
    EmptyLayer,
    RecurrentLayer,
    SharedLayer,
    SideBySideLayer,
)
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import gather_positions

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
    return "shows no queries" if layer.attends and not layer.shows_queries else None


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
        policy: The policy.
        layers: The layers of the cache.
        decoder: The model's decoder.
        kind: Settings of the forwards; see `ActingForward`.
        begin: A function that is called with every forward before it runs.
        records: Whether the hidden states of all layers are asked for.
        features: Features to add to the chunk's hidden states between layers; None if there are
            none.
    """

    policy: CachePolicy
    layers: list[PolicyLayer]
    decoder: nn.Module
    kind: dict[str, Any]
    begin: Callable[[StageForward], None]
    records: bool
    features: AddedFeatures | None = None

    def chunk(self, incoming: Incoming, chunks: Chunks | None, missing: int) -> StageChunk:
        """Make the forward over a chunk that does not end the prompt.

        Args:
            incoming: The chunk.
            chunks: The chunks before it; None if it is the first.
            missing: Number of columns of the prompt that are still to be read, this chunk included.
        """
        self._check()
        if chunks is None:
            staged = StagedPrompt(
                self._stages(incoming, missing),
                incoming.tokens,
                tuple(layer.state() for layer in self.layers),
            )
            chunks = Chunks(self.policy.num_queries, staged=staged)
        assert chunks.staged is not None
        stage = chunks.staged.stages[0]
        inputs = self._inputs(incoming, chunks.staged)
        piece = StageInput(stage, stage.looks, nested=False, inputs=inputs)
        return StageChunk(
            self.policy,
            self.layers,
            incoming,
            chunks=chunks,
            missing=missing,
            piece=piece,
            features=self.features,
            **self.kind,
        )

    def end(self, incoming: Incoming, chunks: Chunks) -> tuple[StageEnd, dict[str, Any]]:
        """Read all stages except the last piece; return its forward and arguments."""
        staged = chunks.staged
        assert staged is not None
        self._check()
        inputs = self._inputs(incoming, staged)
        first, *others = staged.stages
        piece = StageInput(first, first.looks, is_output=not others, nested=bool(others))
        forward = StageEnd(
            self.policy,
            self.layers,
            incoming,
            chunks=chunks,
            piece=piece,
            features=self.features,
            **self.kind,
        )
        if not others:
            return forward, incoming.arguments
        self._run(forward, incoming.arguments)
        staged = staged.with_chunk(incoming.new_valid, inputs, forward.held, self.features)
        whole, begun = forward.tokens, staged.begun
        valid = torch.cat(staged.valid, dim=1)
        order = valid.to(torch.uint8).argsort(dim=1, stable=True)  # padding first
        valid = valid.gather(1, order)
        reach = _SurvivingTokens(
            order.masked_fill(~valid, -1), begun.positions_of(valid), staged.states, order
        )
        reach = _passed_on(reach, forward)
        propagated: dict[int, Tensor] = {}
        if valid.shape != reach.columns.shape or not torch.equal(valid, reach.columns >= 0):
            propagated[first.last] = reach.positions
        if self.policy.propagation.restarts:
            for layer, state in zip(self.layers, staged.before, strict=True):
                layer.restore(state)
            skipped = valid.sum(dim=1) - (reach.columns >= 0).sum(dim=1)
            before = 0 if whole.skipped is None else whole.skipped
            whole = attrs.evolve(whole, skipped=before + skipped)
            reach = attrs.evolve(reach, parts=(), places=None, resumed=None, history=None)
        del forward, valid, order
        features = AddedFeatures.joined(staged.features, staged.valid)
        reader = _Stages(self, staged, whole, incoming, features)
        for stage in others[:-1]:
            reach = reader.read(stage, reach, propagated)
        last, arguments = reader.end(others[-1], reach)
        last.propagated.update(propagated)
        return last, arguments

    def _run(self, forward: StageForward, arguments: dict[str, Any]) -> None:
        self.begin(forward)
        try:
            # `forward` is called directly, since this code runs inside a hook of the decoder.
            self.decoder.forward(**arguments)
        except StageRead:
            forward.finish()
            return
        raise AssertionError("the stage's last layer was never reached")

    def _stages(self, incoming: Incoming, prompt_len: int) -> tuple[PrefillStage, ...]:
        num_layers, propagation = len(self.layers), self.policy.propagation
        seen = int(incoming.tokens.lengths.max()) + prompt_len

        def few_go_on(index: int) -> bool:
            plain = type(self.layers[index]) is PolicyLayer and self.layers[index].shows_queries
            if not (plain and self.kind["narrows"]) or self.kind["windows"][index] is not None:
                return False
            if propagation.decides_by_content:  # the number is known only from queries and keys
                return True
            rate = propagation.layer_rates(num_layers, context_len=seen)[index + 1]
            return bool(rate * seen <= LARGEST_SHARE * prompt_len)

        return stages_of(self.policy, num_layers, few_go_on)

    def _check(self) -> None:
        """Check that the prompt may be read in chunks.

        Raises:
            UnsupportedModelError: The model has layers that cannot be left out and resumed, makes
                masks outside of its decoder, takes no position ids, or gives its output the shape
                of its input.
            UnsupportedGenerationError: Hidden states or attention weights are asked for.
        """
        remedy = f"and {self.policy} drops tokens; leave prefill_chunk_size at None"
        for index, layer in enumerate(self.layers):
            if (why := _why_whole(layer)) is not None:
                raise UnsupportedModelError(
                    f"a prompt must come in one forward where a layer {why}, as layer {index} "
                    f"does, {remedy}"
                )
        takes = "position_ids" in signature(type(self.decoder).forward).parameters
        reasons = {
            "takes no position_ids": not takes,
            "gets its masks from the model around it": self.kind["own_masks"],
            "gives its output the shape of its input": self.kind["refills"],
        }
        for why, holds in reasons.items():
            if holds:
                raise UnsupportedModelError(
                    f"a prompt must come in one forward where the decoder {why}, {remedy}"
                )
        if self.kind["attended"] is not None or self.records:
            raise UnsupportedGenerationError(
                "output_attentions and output_hidden_states must be False where a prompt comes in "
                f"chunks {remedy}, since which tokens they are of is known at its end"
            )

    def _inputs(self, incoming: Incoming, staged: StagedPrompt) -> dict[str, Tensor]:
        """Return the decoder's inputs for a chunk's tokens; see `StagedPrompt`.

        Raises:
            ValueError: See `check_positions`.
            UnsupportedGenerationError: Earlier chunks were ids and this one is embeddings, or the
                reverse.
        """
        if self.policy.propagation.restarts:
            check_positions(self.policy, incoming)
        arguments = incoming.arguments
        inputs = {
            name: arguments[name] for name in OF_TOKENS if isinstance(arguments.get(name), Tensor)
        }
        if staged.inputs and inputs.keys() != staged.inputs[0].keys() - {"position_ids"}:
            before = ", ".join(sorted(staged.inputs[0].keys() - {"position_ids"}))
            raise UnsupportedGenerationError(
                "chunks of a prompt must be given as all input_ids or all inputs_embeds where "
                f"{self.policy} drops tokens, got {', '.join(sorted(inputs))} behind {before}"
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
        prefill: The prefill, which makes and runs forwards.
        staged: All chunks of the prompt.
        whole: The tokens seen, the prompt included.
        incoming: The last chunk.
        features: Features to add to hidden states of the prompt between layers; None if there are
            none.
    """

    prefill: StagedPrefill
    staged: StagedPrompt
    whole: SeenTokens
    incoming: Incoming
    features: AddedFeatures | None

    def read(
        self, stage: PrefillStage, reach: _SurvivingTokens, propagated: dict[int, Tensor]
    ) -> _SurvivingTokens:
        """Read a stage; return the tokens that reach the next one."""
        forward, arguments, held = self._read_but_last(stage, reach, is_output=False)
        self.prefill._run(forward, arguments)
        assert forward.held is not None
        held.append(forward.held)
        everything = torch.arange(reach.columns.shape[1], device=reach.columns.device)
        reach = attrs.evolve(
            reach,
            parts=tuple(held),
            places=torch.where(reach.columns >= 0, everything, -1),
            resumed=None,
        )
        passed = _passed_on(reach, forward)
        if forward.passed is not None:
            propagated[stage.last] = passed.positions
        return passed

    def end(self, stage: PrefillStage, reach: _SurvivingTokens) -> tuple[StageEnd, dict[str, Any]]:
        """Read the last stage except its last piece; return that piece's forward and arguments."""
        forward, arguments, _ = self._read_but_last(stage, reach, is_output=True)
        return forward, arguments

    def _read_but_last(
        self, stage: PrefillStage, reach: _SurvivingTokens, *, is_output: bool
    ) -> tuple[StageEnd, dict[str, Any], list[Tensor]]:
        prefill, begun = self.prefill, self.staged.begun
        # The tokens that layers held before the prompt, then those of the prompt read in this
        # stage.
        tokens = attrs.evolve(self.whole, appended=begun.appended, appended_ids=begun.appended_ids)
        for layer in prefill.layers[stage.first + (reach.resumed is not None) : stage.last + 1]:
            layer.follow(tokens)
        started = begun.lengths > 0
        chunks = Chunks(prefill.policy.num_queries)
        held: list[Tensor] = []
        pieces = self._pieces(reach)
        looks = stage.looks or (is_output and self._may_look(stage.last))
        for columns in pieces[:-1]:
            incoming = self._incoming(reach, columns)
            positions = reach.positions[:, columns]
            tokens = attrs.evolve(tokens, appended=torch.cat([tokens.appended, positions], dim=1))
            piece = self._piece(stage, reach, columns, looks=looks, tokens=tokens, started=started)
            forward = StageChunk(
                prefill.policy,
                prefill.layers,
                incoming,
                chunks=chunks,
                missing=reach.columns.shape[1] - columns.start,
                piece=piece,
                features=self._features_of(reach, columns),
                **prefill.kind,
            )
            prefill._run(forward, incoming.arguments)
            chunks = forward.chunks
            started = started | (positions >= 0).any(dim=1)
            if forward.held is not None and not is_output:
                held.append(forward.held)
        incoming = self._incoming(reach, pieces[-1])
        piece = self._piece(
            stage, reach, pieces[-1], looks=stage.looks, tokens=self.whole, started=started
        )
        piece = attrs.evolve(piece, is_output=is_output, nested=not is_output)
        last = StageEnd(
            prefill.policy,
            prefill.layers,
            incoming,
            chunks=chunks,
            piece=piece,
            features=self._features_of(reach, pieces[-1]),
            **prefill.kind,
        )
        return last, incoming.arguments, held

    def _features_of(self, reach: _SurvivingTokens, columns: slice) -> AddedFeatures | None:
        """Return the features for some of the tokens that reach a stage."""
        return None if self.features is None else self.features.taken(reach.columns[:, columns])

    def _may_look(self, index: int) -> bool:
        """True if it is allowed to compute only the queries and keys of a layer."""
        plain = type(self.prefill.layers[index]) is PolicyLayer
        return plain and self.prefill.kind["narrows"]

    def _piece(
        self,
        stage: PrefillStage,
        reach: _SurvivingTokens,
        columns: slice,
        *,
        looks: bool,
        tokens: SeenTokens,
        started: Tensor,
    ) -> StageInput:
        states = resumed = None
        if reach.parts:
            assert reach.places is not None
            states = taken_from(reach.parts, reach.places[:, columns])
        if reach.resumed is not None:
            narrowed, slots = reach.resumed
            resumed = attrs.evolve(narrowed, slots=slots[:, columns])
        return StageInput(
            stage,
            looks,
            tokens=tokens,
            started=started,
            states=states,
            resumed=resumed,
            history=reach.history,
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
        own, last = reach.columns[:, columns], self.incoming
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
        if self.prefill.policy.propagation.restarts:
            return self.staged.begun.rotary_positions_of(reach.columns >= 0)[:, columns]
        given = [each["position_ids"] for each in self.staged.inputs]
        return taken_from(given, reach.columns[:, columns]).movedim((0, 1), (-2, -1))


def _passed_on(reach: _SurvivingTokens, forward: StageEnd) -> _SurvivingTokens:
    """Return the tokens of a stage that reach the next one."""
    length = reach.columns.shape[1]
    slots = forward.passed
    if slots is None:
        everything = torch.arange(length, device=reach.columns.device)
        slots = torch.where(reach.columns >= 0, everything, -1)
    resumed = None
    if forward.attended is not None and reach.places is not None:
        keys, values, valid = forward.attended
        own = torch.where(slots < 0, -1, slots + keys.shape[2] - length).to(keys.device)
        narrowed = Narrowed(keys, values, own, valid, forward.implementation)
        resumed = narrowed, own
    places = None if reach.places is None else gather_positions(reach.places, slots)
    return attrs.evolve(
        reach,
        columns=gather_positions(reach.columns, slots),
        positions=gather_positions(reach.positions, slots),
        places=places,
        resumed=resumed,
        history=forward.history.taken(slots),
    )
