"""Read a prompt in chunks under a policy that drops tokens: all passes of all stages.

Each stage reads the tokens that the previous one passes on, in pieces no longer than the chunks
were. The decoder gets the ids and positions of these tokens, so that all arguments of its layers
belong to them. Only the hidden states come from the previous stage.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.chunks import Chunks, Remember
from kvpolicy.integrations.transformers.forward.facts import Call
from kvpolicy.integrations.transformers.forward.history import History
from kvpolicy.integrations.transformers.forward.inputs import OF_TOKENS, Incoming
from kvpolicy.integrations.transformers.forward.later_stages import (
    LaterStages,
    Passes,
    SurvivingTokens,
    passed_on,
    stage_pass,
)
from kvpolicy.integrations.transformers.forward.narrowing import few_go_on
from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.integrations.transformers.forward.passes import Pass
from kvpolicy.integrations.transformers.forward.restart import check_positions
from kvpolicy.integrations.transformers.forward.selecting import ChooseTokens, Select
from kvpolicy.integrations.transformers.forward.stage import PrefillStage, StagePiece, stages_of
from kvpolicy.integrations.transformers.forward.staged_prompt import StagedPrompt
from kvpolicy.integrations.transformers.model.call_arguments import signature
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layers import held_by, hold_again, why_whole
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.selection import gather_positions


@attrs.frozen(eq=False)
class SharedStage:
    """What the layers up to a drop have left, if a forward of another cache has run them.

    Args:
        slots: ``[batch, passed_len]`` int64, the prompt's tokens that go on; -1 on padding.
        positions: ``[batch, passed_len]`` int64, their positions.
        states: ``[batch, passed_len, hidden]``, the dropping layer's output for them.
        drops: Whether they are fewer than all.
        tokens: The tokens seen, the prompt included.
        history: The saliency that earlier layers gave these tokens.
    """

    slots: Tensor
    positions: Tensor
    states: Tensor
    drops: bool
    tokens: SeenTokens
    history: History


@attrs.frozen(eq=False)
class StagedPrefill:
    """A reader of a prompt in chunks under a policy that drops tokens between layers.

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
        """Return the record with which a prompt begins, before its first chunk is read.

        Args:
            missing: Number of columns of the prompt.
        """
        self._check()
        stages = self._stages(missing)
        before = held_by(self.layers) if self._restarts else ()
        staged = StagedPrompt(stages, self.incoming.tokens, before)
        return Chunks(self.call.model.policy.num_queries, staged=staged)

    def chunk(self, chunks: Chunks, missing: int) -> Pass:
        """Make the pass that reads a chunk after which more of the prompt follows.

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
        return stage_pass(
            self.call,
            self.incoming,
            Remember(chunks, only=frozenset({stage.last}) if self._restarts else None),
            piece,
            missing=missing,
            features=self.features,
            main=True,
        )

    def with_chunk(self, chunks: Chunks, run: PassRun) -> Chunks:
        """Return the record of chunks with the current chunk, which ``run`` has read, added.

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
        """Yield all passes that read the last chunk and so end the prompt.

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
        run = yield stage_pass(
            self.call, incoming, at_end, piece, features=self.features, main=not others
        )
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
        reach = SurvivingTokens(
            order.masked_fill(~valid, -1), begun.positions_of(valid), staged.states, order
        )
        reach = passed_on(reach, run)
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
        features = AddedFeatures.joined(staged.features, staged.valid)
        reader = LaterStages(
            self.call,
            self.layers,
            incoming,
            staged,
            whole,
            features,
        )
        for stage in others[:-1]:
            reach = yield from reader.read(stage, reach, propagated)
        yield from reader.end(others[-1], reach, propagated)

    def behind_drop(self, shared: SharedStage) -> Passes:
        """Yield the passes of the layers behind the only drop, for a prompt that came whole.

        Args:
            shared: What the layers up to the drop have left.
        """
        self._check()
        first, stage = stages_of(self.call.model.policy, len(self.layers), lambda _: False)
        valid, slots = self.incoming.new_valid, shared.slots
        staged = StagedPrompt((first, stage), self.incoming.tokens, ())
        staged = staged.with_chunk(valid, self._inputs(staged), shared.states, self.features)
        places = torch.arange(slots.shape[1], device=slots.device)
        reach = SurvivingTokens(
            slots,
            shared.positions,
            staged.states,
            places.where(slots >= 0, slots),
            history=shared.history,
        )
        features = AddedFeatures.joined(staged.features, staged.valid)
        how = self.call, self.layers, self.incoming, staged, shared.tokens, features
        propagated = {first.last: shared.positions} if shared.drops else {}
        yield from LaterStages(*how).end(stage, reach, propagated)

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
        """Check that the model and the call allow the prompt to be read in chunks.

        Raises:
            UnsupportedModelError: The model has layers that cannot be left out and resumed, makes
                masks outside of its decoder, takes no position ids, or gives its output the shape
                of its input.
            UnsupportedGenerationError: Hidden states or attention weights are asked for.
        """
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
        """Return the ids or embeddings of a chunk, and its position ids, as the decoder takes them.

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
                "chunks of a prompt must be given as all input_ids or all inputs_embeds if "
                f"{policy} drops tokens, got {', '.join(sorted(inputs))} after {before}"
            )
        positions = arguments.get("position_ids")
        if positions is None:
            positions = incoming.tokens.rotary_positions_of(incoming.new_valid)
        batch = incoming.new_valid.shape[0]
        positions = positions.expand(*positions.shape[:-2], batch, -1)
        return {**inputs, "position_ids": positions.movedim((-2, -1), (0, 1))}
