"""Describe the stages of a prompt that is read in chunks under a policy that drops tokens.

A stage is a range of layers that the same tokens pass through. The tokens that a layer drops are
known only at the end of the prompt. So while chunks arrive, the layers behind the first drop return
at once, and the hidden states that go into them are held. If the dropping layer passes on few
tokens, a stage ends inside this layer, once its queries and keys are computed. When the prompt has
ended, each layer of a later stage reads what reaches it piece by piece, before the next layer
begins; see `LaterLayers`. A restart has two stages, and the second one begins with the embeddings.
"""

from collections.abc import Mapping

import attrs
from torch import Tensor

from kvpolicy.integrations.transformers.forward.added_features import AddedFeatures
from kvpolicy.integrations.transformers.forward.blocks import Narrowed
from kvpolicy.integrations.transformers.state.layers import LayersHeld
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.frozen
class PrefillStage:
    """A range of layers that the same tokens of a prompt reach.

    Args:
        last: Index of the last layer, after which tokens are dropped or the model ends; -1 if there
            are no layers.
        looks: Whether the stage ends inside its last layer, once queries and keys are known. The
            next stage then begins with that layer, run for the tokens that are passed on.
    """

    first: int
    last: int
    looks: bool = False

    @property
    def layers(self) -> range:
        """The indices of the layers."""
        return range(self.first, self.last + 1)


# Of a run that leaves all layers to others.
NO_LAYERS = PrefillStage(0, -1)


@attrs.frozen(eq=False)
class StagedPrompt:
    """A record of a prompt's chunks so far, which later layers read once the prompt ends.

    Args:
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


@attrs.frozen(eq=False)
class StagePiece:
    """A plan of what one pass reads in one range of layers: its tokens and where they enter.

    Args:
        looks: Whether the pass ends inside the stage's last layer.
        is_output: Whether the stage is the last one.
        tokens: The tokens seen, this piece included, for layers of a later stage; None in the first
            stage.
        started: ``[batch]`` bool, rows in which layers have read tokens before; None if they are
            the rows in which the cache has.
        resumed: The second run of the first layer, if the previous stage ended inside it.
    """

    stage: PrefillStage
    looks: bool = False
    is_output: bool = False
    tokens: SeenTokens | None = None
    started: Tensor | None = None
    resumed: Narrowed | None = None
