"""Read a prompt in chunks under a policy that drops tokens: all passes of all stages.

The last chunk is read up to the first drop. Then the layers behind it read what goes on of all
chunks; see `LaterLayers`.
"""

from collections.abc import Generator

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.arriving import check_positions
from kvpolicy.integrations.transformers.forward.blocks import few_go_on
from kvpolicy.integrations.transformers.forward.chunks import Chunks, Remember
from kvpolicy.integrations.transformers.forward.facts import Call
from kvpolicy.integrations.transformers.forward.inputs import OF_TOKENS, Incoming
from kvpolicy.integrations.transformers.forward.later_layers import (
    LaterLayers,
    SurvivingTokens,
    incoming_of,
    passed_on,
    pieces_of,
)
from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.integrations.transformers.forward.passes import Pass
from kvpolicy.integrations.transformers.forward.selecting import ChooseTokens, DeferredKV, Select
from kvpolicy.integrations.transformers.forward.stage import (
    NO_LAYERS,
    PrefillStage,
    StagedPrompt,
    StagePiece,
)
from kvpolicy.integrations.transformers.model.modules import signature
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layers import held_by, hold_again, why_whole
from kvpolicy.selection import gather_positions


class StagedPrefill:
    """A reader of a prompt in chunks under a policy that drops tokens; see `Arrival`."""

    def __init__(
        self,
        call: Call,
        layers: list[PolicyLayer],
        incoming: Incoming,
        features: AddedFeatures | None,
        chunks: Chunks | None,
        missing: int,
    ) -> None:
        self._call, self._layers, self._incoming = call, layers, incoming
        self._features, self._missing = features, missing
        self._restarts = call.model.restarts
        self._check()
        if chunks is None:
            before = held_by(layers) if self._restarts else ()
            staged = StagedPrompt(self._stages(), incoming.tokens, before)
            chunks = Chunks(call.model.policy.num_queries, staged=staged)
        assert chunks.staged is not None
        self._chunks, self._staged = chunks, chunks.staged
        self._inputs = self._checked_inputs()

    def chunk(self) -> Generator[Pass, PassRun, Chunks]:
        """Yield the pass that reads a chunk before the last; return the record of all chunks."""
        stage = self._staged.stages[0]
        only = frozenset({stage.last}) if self._restarts else None
        remember = Remember(self._chunks, only=only)
        run = yield Pass(
            self._incoming,
            remember,
            stage=StagePiece(stage, stage.looks),
            missing=self._missing,
            features=self._features,
            main=True,
        )
        remember.settle()
        return attrs.evolve(remember.chunks(run.at), staged=self._with_chunk(run))

    def _with_chunk(self, run: PassRun) -> StagedPrompt:
        """Return the record of the prompt with the current chunk, which ``run`` has read, added."""
        staged = self._staged
        held = () if run.held is None or self._restarts else (run.held,)
        return attrs.evolve(
            staged,
            valid=(*staged.valid, self._incoming.new_valid),
            inputs=(*staged.inputs, self._inputs),
            states=(*staged.states, *held),
            features=(*staged.features, self._features),
        )

    def end(self) -> Generator[Pass, PassRun, dict[int, DeferredKV]]:
        """Yield all passes that read the last chunk; return the layers that wait to choose."""
        first, *others = self._staged.stages
        if self._restarts:
            run = yield Pass(
                self._incoming,
                ChooseTokens(first.last, self._chunks),
                stage=StagePiece(first),
                features=self._features,
                ends_inside=first.last,
            )
            select = Select()
            made = self._again(run, select)
        else:

            def then(run: PassRun) -> LaterLayers:
                own = self._with_chunk(run)
                reach = self._surviving(own, run)
                return LaterLayers(run, self._incoming, own, run.tokens, others, *reach)

            select = Select(self._chunks)
            made = Pass(
                self._incoming,
                select,
                stage=StagePiece(first, first.looks, is_output=not others),
                features=self._features,
                main=True,
                then=then if others else None,
            )
        run = yield made
        if run.later is not None:
            return {**select.waiting, **run.later.waiting}
        if select.passed is not None:  # behind the last layer
            valid = self._chunks.prompt_valid(self._incoming.new_valid)
            prompt = self._staged.begun.positions_of(valid)
            run.propagated[first.last] = gather_positions(prompt, select.passed)
        return select.waiting

    def _again(self, run: PassRun, select: Select) -> Pass:
        """Return the pass that reads the tokens chosen by ``run``, before which nothing is held."""
        staged = self._with_chunk(run)
        reach, propagated = self._surviving(staged, run)
        hold_again(self._layers, staged.before)
        skipped = torch.cat(staged.valid, dim=1).sum(dim=1) - (reach.columns >= 0).sum(dim=1)
        before = 0 if run.tokens.skipped is None else run.tokens.skipped
        whole = attrs.evolve(run.tokens, skipped=before + skipped)
        reach = attrs.evolve(reach, parts=(), places=None, resumed=None, history=None)
        last = incoming_of(self._call, self._incoming, staged, reach, pieces_of(staged, reach)[-1])
        stages = staged.stages[1:]
        return Pass(
            last,
            select,
            stage=StagePiece(NO_LAYERS, is_output=True, tokens=whole),
            main=True,
            then=lambda run: LaterLayers(
                run, self._incoming, staged, whole, stages, reach, propagated
            ),
        )

    def _surviving(
        self, staged: StagedPrompt, run: PassRun
    ) -> tuple[SurvivingTokens, dict[int, Tensor]]:
        """Return the tokens that go on from the first stage, and their positions by its layer."""
        valid = torch.cat(staged.valid, dim=1)
        order = valid.to(torch.uint8).argsort(dim=1, stable=True)  # padding first
        valid = valid.gather(1, order)
        positions = staged.begun.positions_of(valid)
        columns = order.masked_fill(~valid, -1)
        reach = passed_on(SurvivingTokens(columns, positions, staged.states, order), run)
        if valid.shape == reach.columns.shape and torch.equal(valid, reach.columns >= 0):
            return reach, {}
        return reach, {staged.stages[0].last: reach.positions}

    def _stages(self) -> tuple[PrefillStage, ...]:
        """Split the layers into ranges, each of which the same tokens of the prompt reach."""
        model, num_layers = self._call.model, len(self._layers)
        acting, propagation = sorted(model.acting), model.policy.propagation
        if self._restarts:
            return PrefillStage(0, acting[0], looks=True), PrefillStage(0, num_layers - 1)
        seen = int(self._incoming.tokens.lengths.max()) + self._missing
        stages, first = [], 0
        for index in acting:
            if index == num_layers - 1:  # no layer follows
                break
            layer = self._layers[index]
            looks = self._call.narrows and layer.plain and layer.facts.shows_queries
            looks = looks and model.windows[index] is None
            looks = looks and few_go_on(propagation, index, num_layers, seen, self._missing)
            stages.append(PrefillStage(first, index, looks))
            first = index if looks else index + 1
        return *stages, PrefillStage(first, num_layers - 1)

    def _check(self) -> None:
        """Check that the model and the call allow the prompt to be read in chunks."""
        remedy = f"and {self._call.model.policy} drops tokens; leave prefill_chunk_size at None"
        for index, layer in enumerate(self._layers):
            if (why := why_whole(layer)) is not None:
                raise UnsupportedModelError(
                    f"a prompt must come in one forward if a layer {why}, as layer {index} does, "
                    f"{remedy}"
                )
        takes = "position_ids" in signature(type(self._call.model.parts.decoder).forward).parameters
        reasons = {
            "takes no position_ids": not takes,
            "gets its masks from the model around it": self._call.own_masks,
            "gives its output the shape of its input": self._call.model.quirks.refills,
        }
        for why, holds in reasons.items():
            if holds:
                raise UnsupportedModelError(
                    f"a prompt must come in one forward if the decoder {why}, {remedy}"
                )
        if self._call.attended is not None or self._call.records:
            raise UnsupportedGenerationError(
                "output_attentions and output_hidden_states must be False if a prompt comes in "
                f"chunks {remedy}, since the tokens to return are known only at the prompt's end"
            )

    def _checked_inputs(self) -> dict[str, Tensor]:
        """Return a chunk's ids or embeddings, and its position ids, as the decoder takes them."""
        incoming, staged, policy = self._incoming, self._staged, self._call.model.policy
        if self._restarts:
            check_positions(policy, incoming)
        arguments = incoming.arguments
        inputs = {
            name: arguments[name] for name in OF_TOKENS if isinstance(arguments.get(name), Tensor)
        }
        if staged.inputs and inputs.keys() != staged.inputs[0].keys() - {"position_ids"}:
            before = ", ".join(sorted(staged.inputs[0].keys() - {"position_ids"}))
            raise UnsupportedGenerationError(
                "chunks of a prompt must be given as all input_ids or all inputs_embeds if "
                f"{policy} drops tokens, got {', '.join(sorted(inputs))} after {before}"
            )
        positions = arguments.get("position_ids")
        if positions is None:
            positions = incoming.tokens.rotary_positions_of(incoming.new_valid)
        batch = incoming.new_valid.shape[0]
        positions = positions.expand(*positions.shape[:-2], batch, -1)
        return {**inputs, "position_ids": positions.movedim((-2, -1), (0, 1))}
