"""Build the `LayerContext` that the parts of a policy get from a layer."""

from __future__ import annotations

from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.heads import Heads
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.layer_inputs import NO_DECODING, PLAIN_LAYER, DecodingInputs, LayerInputs
from kvpolicy.rotary import RotaryEmbedding


def layer_context(
    index: int,
    num_layers: int,
    layer: PolicyLayer,
    inputs: AttentionInputs,
    positions: Tensor,
    *,
    new_valid: Tensor,
    seen_len: tuple[int, ...],
    queries: Tensor | None = None,
    stored: tuple[Tensor, Tensor] | None = None,
    tokens: SeenTokens | None = None,
    held_len: tuple[int, ...] | None = None,
    decoding: DecodingInputs = NO_DECODING,
    rotary: RotaryEmbedding | None = None,
    output_weight: Tensor | None = None,
    history: tuple[Tensor, ...] = (),
) -> LayerContext:
    """Build the `LayerContext` in which a policy sees one layer.

    Args:
        index: Index of the layer.
        num_layers: Number of layers of the model.
        layer: The layer in the cache.
        inputs: The queries, keys and values of its attention, and how scores are made of them.
        positions: See `LayerContext`.
        new_valid: See `LayerContext`, on any device.
        seen_len: See `LayerContext`.
        queries: The queries to show; None for those of ``inputs``.
        stored: The keys and values that the layer holds, from which attention may have computed
            those in ``inputs``; None if parts are shown what the layer holds.
        tokens: The tokens seen, for their kinds; None if all tokens are text.
        held_len: See `LayerContext`.
        decoding: See `LayerContext`.
        rotary: See `LayerInputs`, as for what follows.
        output_weight: See `LayerInputs`.
        history: See `LayerInputs`.
    """
    keys = inputs.keys
    # Compared by number of heads, since keys may be changed and still be one for each head.
    held_as_shown = stored is None or keys.shape[1] == stored[0].shape[1]
    kinds = None if tokens is None or tokens.kinds is None else tokens.kinds_at(positions)
    heads = layer.facts.spread.heads(inputs.queries.shape[1])
    asked = rotary is not None or output_weight is not None or history
    plain = type(heads) is Heads and not asked
    return LayerContext(
        layer_idx=index,
        num_layers=num_layers,
        queries=inputs.queries if queries is None else queries,
        keys=keys,
        values=inputs.values,
        stored=None if held_as_shown and not layer.one_choice else stored,
        positions=positions,
        kinds=kinds,
        new_valid=new_valid.to(keys.device),
        seen_len=seen_len,
        attention=inputs.scores,
        layer=PLAIN_LAYER if plain else LayerInputs(heads, rotary, output_weight, history),
        decoding=decoding,
        held_len=held_len,
    )
