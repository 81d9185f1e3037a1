"""What the chunks of a prompt leave for its further stages, where tokens are dropped."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.state.layer import State
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.frozen
class Stage:
    """Layers that the same tokens of a prompt reach.

    Args:
        first: The first of them.
        last: The last of them, after which tokens are dropped or the prompt is over.
        looks: Whether it ends inside of the last one, once queries and keys are known: the next
            stage begins with that layer, run for the tokens that go on.
    """

    first: int
    last: int
    looks: bool = False


@attrs.frozen(eq=False)
class StagedPrompt:
    """The chunks of a prompt so far, as its further stages are to read them.

    Args:
        stages: All stages of the prompt.
        begun: The tokens seen before it.
        before: What every layer held before it.
        valid: By chunk, ``[batch, new_len]`` bool, False on padding.
        inputs: By chunk, what its tokens are to the decoder, ``[batch, new_len, ...]`` each by
            name; position ids with the axis of rows first as well.
        states: By chunk, the hidden states ``[batch, new_len, hidden]`` that go into the second
            stage; none where the prefill restarts.
        features: By chunk, what is added to hidden states between layers; None for nothing.
    """

    stages: tuple[Stage, ...]
    begun: SeenTokens
    before: tuple[State, ...]
    valid: tuple[Tensor, ...] = ()
    inputs: tuple[Mapping[str, Tensor], ...] = ()
    states: tuple[Tensor, ...] = ()
    features: tuple[AddedFeatures | None, ...] = ()

    def with_chunk(
        self,
        valid: Tensor,
        inputs: Mapping[str, Tensor],
        states: Tensor | None,
        features: AddedFeatures | None,
    ) -> StagedPrompt:
        """With one more chunk."""
        return attrs.evolve(
            self,
            valid=(*self.valid, valid),
            inputs=(*self.inputs, inputs),
            states=self.states if states is None else (*self.states, states),
            features=(*self.features, features),
        )
