"""Read a prompt in chunks under a policy that drops tokens: all passes of all stages.

The last chunk is read up to the first drop. Then the layers behind it read what goes on of all
chunks; see `LaterLayers`.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
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
from kvpolicy.integrations.transformers.forward.narrowing import few_go_on
from kvpolicy.integrations.transformers.forward.pass_run import Passes, PassRun
from kvpolicy.integrations.transformers.forward.passes import Pass
from kvpolicy.integrations.transformers.forward.restart import check_positions
from kvpolicy.integrations.transformers.forward.selecting import ChooseTokens, DeferredKV, Select
from kvpolicy.integrations.transformers.forward.stage import (
    NO_LAYERS,
    PrefillStage,
    StagedPrompt,
    StagePiece,
    stages_of,
)
from kvpolicy.integrations.transformers.model.modules import signature
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layers import held_by, hold_again, why_whole
from kvpolicy.selection import gather_positions


@attrs.frozen(eq=False)
class StagedPrefill:
    """A reader of a prompt in chunks under a policy that drops tokens between layers.

    Args:
        incoming: The current chunk.
    """

    call: Call
    layers: list[PolicyLayer]
    incoming: Incoming
    features: AddedFeatures | None = None

    @property
    def _restarts(self) -> bool:
        return self.call.model.restarts

    def begun(self, missing: int) -> Chunks:
        """Return the record with which a prompt begins, before its first chunk is read."""
        self._check()
        stages = self._stages(missing)
        before = held_by(self.layers) if self._restarts else ()
        staged = StagedPrompt(stages, self.incoming.tokens, before)
        return Chunks(self.call.model.policy.num_queries, staged=staged)

    def chunk(self, chunks: Chunks, missing: int) -> Pass:
        """Make the pass that reads a chunk behind ``chunks``, before the last one."""
        self._check()
        staged = chunks.staged
        assert staged is not None
        self._inputs(staged)
        stage = staged.stages[0]
        piece = StagePiece(stage, stage.looks)
        return Pass(
            self.incoming,
            Remember(chunks, only=frozenset({stage.last}) if self._restarts else None),
            stage=piece,
            missing=missing,
            features=self.features,
            main=True,
        )

    def with_chunk(self, chunks: Chunks, run: PassRun) -> Chunks:
        """Return the record of chunks with the current chunk, which ``run`` has read, added."""
        staged = chunks.staged
        assert staged is not None
        held = None if self._restarts else run.held
        valid = self.incoming.new_valid
        staged = staged.with_chunk(valid, self._inputs(staged), held, self.features)
        return attrs.evolve(chunks, staged=staged)

    def end(self, chunks: Chunks, waiting: dict[int, DeferredKV]) -> Passes:
        """Yield all passes that read the last chunk and so end the prompt."""
        self._check()
        staged = chunks.staged
        assert staged is not None
        self._inputs(staged)
        first, *others = staged.stages
        if self._restarts:
            run = yield Pass(
                self.incoming,
                ChooseTokens(first.last, chunks),
                stage=StagePiece(first),
                features=self.features,
                ends_inside=first.last,
            )
            made = self._again(chunks, run)
        else:

            def then(run: PassRun) -> LaterLayers:
                own = self.with_chunk(chunks, run).staged
                assert own is not None
                later = LaterLayers(run, self.incoming, own, run.tokens, others)
                return later.begun(run, *self._surviving(own, run))

            made = Pass(
                self.incoming,
                Select(chunks),
                stage=StagePiece(first, first.looks, is_output=not others),
                features=self.features,
                main=True,
                then=then if others else None,
            )
        run = yield made
        select = made.at_queries
        assert isinstance(select, Select)
        waiting |= select.waiting
        if run.later is not None:
            waiting |= run.later.waiting
        elif select.passed is not None:  # behind the last layer
            prompt = staged.begun.positions_of(chunks.prompt_valid(self.incoming.new_valid))
            run.propagated[first.last] = gather_positions(prompt, select.passed)

    def _again(self, chunks: Chunks, run: PassRun) -> Pass:
        """Return the pass that reads the tokens chosen by ``run``, before which nothing is held."""
        staged = self.with_chunk(chunks, run).staged
        assert staged is not None
        reach, propagated = self._surviving(staged, run)
        hold_again(self.layers, staged.before)
        skipped = torch.cat(staged.valid, dim=1).sum(dim=1) - (reach.columns >= 0).sum(dim=1)
        before = 0 if run.tokens.skipped is None else run.tokens.skipped
        whole = attrs.evolve(run.tokens, skipped=before + skipped)
        reach = attrs.evolve(reach, parts=(), places=None, resumed=None, history=None)
        last = incoming_of(self.call, self.incoming, staged, reach, pieces_of(staged, reach)[-1])

        def then(run: PassRun) -> LaterLayers:
            later = LaterLayers(run, self.incoming, staged, whole, staged.stages[1:])
            return later.begun(run, reach, propagated)

        return Pass(
            last,
            Select(),
            stage=StagePiece(NO_LAYERS, is_output=True, tokens=whole),
            main=True,
            then=then,
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

    def _stages(self, prompt_len: int) -> tuple[PrefillStage, ...]:
        model, num_layers = self.call.model, len(self.layers)
        seen = int(self.incoming.tokens.lengths.max()) + prompt_len

        def narrows(index: int) -> bool:
            plain = self.layers[index].plain
            plain = plain and self.layers[index].facts.shows_queries
            if not (plain and self.call.narrows) or model.windows[index] is not None:
                return False
            return few_go_on(model.policy.propagation, index, num_layers, seen, prompt_len)

        return stages_of(model.policy, num_layers, narrows)

    def _check(self) -> None:
        """Check that the model and the call allow the prompt to be read in chunks."""
        remedy = f"and {self.call.model.policy} drops tokens; leave prefill_chunk_size at None"
        for index, layer in enumerate(self.layers):
            if (why := why_whole(layer)) is not None:
                raise UnsupportedModelError(
                    f"a prompt must come in one forward if a layer {why}, as layer {index} does, "
                    f"{remedy}"
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
                    f"a prompt must come in one forward if the decoder {why}, {remedy}"
                )
        if self.call.attended is not None or self.call.records:
            raise UnsupportedGenerationError(
                "output_attentions and output_hidden_states must be False if a prompt comes in "
                f"chunks {remedy}, since the tokens to return are known only at the prompt's end"
            )

    def _inputs(self, staged: StagedPrompt) -> dict[str, Tensor]:
        """Return a chunk's ids or embeddings, and its position ids, as the decoder takes them."""
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
                "chunks of a prompt must be given as all input_ids or all inputs_embeds if "
                f"{policy} drops tokens, got {', '.join(sorted(inputs))} after {before}"
            )
        positions = arguments.get("position_ids")
        if positions is None:
            positions = incoming.tokens.rotary_positions_of(incoming.new_valid)
        batch = incoming.new_valid.shape[0]
        positions = positions.expand(*positions.shape[:-2], batch, -1)
        return {**inputs, "position_ids": positions.movedim((-2, -1), (0, 1))}
