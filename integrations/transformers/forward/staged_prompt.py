"""Record the inputs of the stages after the first, chunk by chunk; see `stage`."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.stage import PrefillStage
from kvpolicy.integrations.transformers.state.layers import LayersHeld
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.frozen(eq=False)
class StagedPrompt:
    """A record of a prompt's chunks so far, which later layers read once the prompt ends.

    Args:
        stages: All stages of the prompt.
        begun: The tokens seen before the prompt.
        before: What every layer held before the prompt, if the prefill restarts; see `hold_again`.
        valid: By chunk, ``[batch, new_len]`` bool, False on padding.
        inputs: By chunk, the decoder's inputs for its tokens by name, ``[batch, new_len, ...]``
            each; position ids also have the axis of rows first.
        states: By chunk, the hidden states ``[batch, new_len, hidden]`` that go into the second
            stage; empty if the prefill restarts.
        features: By chunk, the features to add to hidden states between layers; None if there are
            none.
    """

    stages: tuple[PrefillStage, ...]
    begun: SeenTokens
    before: LayersHeld
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
        """Return a copy of the record with one more chunk of the prompt."""
        return attrs.evolve(
            self,
            valid=(*self.valid, valid),
            inputs=(*self.inputs, inputs),
            states=self.states if states is None else (*self.states, states),
            features=(*self.features, features),
        )
