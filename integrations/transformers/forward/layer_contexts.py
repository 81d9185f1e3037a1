"""Build the `LayerContext` that the parts of a policy get from a layer."""

from __future__ import annotations

import attrs
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.context import LayerContext
from kvpolicy.heads import Heads
from kvpolicy.integrations.transformers.forward.passes import AtQueries, PassState, Stored
from kvpolicy.integrations.transformers.model.parallel import ALL_HEADS
from kvpolicy.integrations.transformers.model.routing import AttentionInputs
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.layer_inputs import NO_DECODING, PLAIN_LAYER, DecodingInputs, LayerInputs
from kvpolicy.part_calls import DeferredChecks
from kvpolicy.rotary import RotaryEmbedding
from kvpolicy.selection import gather_slots


@attrs.frozen(eq=False)
class History:
    """A record of the saliencies that earlier layers gave to the tokens that reach this layer.

    `CachePolicy.remembered_layers` says which layers must compute it. It is cut together with the
    tokens that layers pass on, and forgotten once no later layer looks at it. By default it is that
    of a policy that uses no other layer's saliency.

    Args:
        layers: Layers whose saliency a later layer looks at.
        longest: Number of last saliencies that are looked at.
        held: float32 ``[batch, heads, new_len]`` each, the newest last.
    """

    layers: frozenset[int] = frozenset()
    longest: int = 0
    held: tuple[Tensor, ...] = ()

    def noted(self, saliency: Tensor, context: LayerContext) -> History:
        """Return a copy with the saliency of one more layer, without those no longer needed."""
        new = saliency[..., context.key_len - context.new_len :]
        new = new.float().masked_fill(~context.new_valid[:, None], 0.0)
        return attrs.evolve(self, held=(*self.held, new)[-self.longest :])

    def taken(self, slots: Tensor) -> History:
        """Return a copy for only the tokens in ``slots`` ``[batch, count]``, -1 on padding."""
        return attrs.evolve(
            self,
            held=tuple(
                gather_slots(each[..., None], slots.to(each.device)[:, None])[..., 0]
                for each in self.held
            ),
        )


def layer_context(
    at: PassState,
    index: int,
    inputs: AttentionInputs,
    positions: Tensor,
    *,
    new_valid: Tensor,
    seen_len: tuple[int, ...],
    queries: Tensor | None = None,
    stored: Stored | None = None,
    tokens: SeenTokens | None = None,
    held_len: tuple[int, ...] | None = None,
    decoding: DecodingInputs = NO_DECODING,
    rotary: RotaryEmbedding | None = None,
    output_weight: Tensor | None = None,
    history: tuple[Tensor, ...] = (),
) -> LayerContext:
    """Build the `LayerContext` in which a policy sees one layer.

    ``inputs`` are what its attention gets, and ``queries`` those to show if not all. ``stored`` is
    what the layer holds, from which attention may compute keys of more heads; None if parts are
    shown what it holds. ``tokens`` are asked for the kinds of tokens.
    """
    layer, keys = at.layers[index], inputs.keys
    # Compared by number of heads, since keys may be changed and still be one for each head.
    held_as_shown = stored is None or keys.shape[1] == stored[0].shape[1]
    kinds = None if tokens is None or tokens.kinds is None else tokens.kinds_at(positions)
    spread = layer.facts.spread
    whole = spread.query_heads is None  # nothing is spread over processes
    heads = ALL_HEADS if whole else spread.heads(inputs.queries.shape[1])
    asked = rotary is not None or output_weight is not None or history
    plain = type(heads) is Heads and not asked
    return LayerContext(
        layer_idx=index,
        num_layers=len(at.layers),
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


def widened(carried: Tensor, key_len: int) -> Tensor:
    """Extend a scorer's state ``[batch, heads, held_len, state_size]`` by 0 for newer keys."""
    return pad(carried, (0, 0, 0, key_len - carried.shape[2]))


class InPrompt(AtQueries):
    """A base class for what a prompt's pass does at each layer: it builds the `LayerContext`.

    Args:
        history: The saliency that layers of earlier passes gave to the tokens of this one; None if
            there were no such passes.
    """

    asks = True

    def __init__(self, history: History | None = None) -> None:
        self._history = history
        self.checks = DeferredChecks()

    def begin(self, at: PassState) -> None:
        """Begin the record of the saliencies that layers give; see `AtQueries.begin`."""
        policy, layers = at.policy, enumerate(at.layers)
        self.history = self._history or History()
        if self._history is None and policy.history_layers:
            choosing = [i for i, each in layers if each.attends and at.masks.windows[i] is None]
            remembered = policy.remembered_layers(len(at.layers), choosing)
            self.history = History(remembered, policy.history_layers)

    def drop(self, slots: Tensor) -> None:
        """See `AtQueries.drop`."""
        self.history = self.history.taken(slots)

    def finish(self, at: PassState) -> SeenTokens:
        """Check what the parts returned, and finish the pass; see `AtQueries.finish`."""
        self.checks.look()
        return at.tokens

    def context(
        self, at: PassState, index: int, inputs: AttentionInputs, stored: Stored
    ) -> LayerContext:
        """Build the `LayerContext` that the policy gets of a layer; see `AtQueries.observe`."""
        layer, policy = at.layers[index], at.policy
        queries, new_valid = self.shown(at, index, inputs.queries)
        count, held = policy.num_queries, inputs.keys.shape[2]
        if count is not None:
            queries = queries[:, :, max(queries.shape[2] - count, 0) :]
        if held < new_valid.shape[1]:  # behind a window in a prompt in chunks; see `chunk_windows`
            new_valid = new_valid[:, -held:]
            queries = queries[:, :, max(queries.shape[2] - held, 0) :]
        device, earlier = inputs.keys.device, self.history.held
        positions = at.masks.positions(layer, inputs.keys.shape[1], device)
        return layer_context(
            at,
            index,
            inputs,
            positions,
            new_valid=new_valid,
            seen_len=at.seen_len,
            queries=queries,
            stored=stored,
            tokens=at.tokens,
            history=tuple(each.to(device) for each in earlier) if earlier else (),
            held_len=at.reach.seen_by(layer),
            rotary=layer.facts.rotary(at.read_at) if policy.needs_rotary else None,
            output_weight=layer.facts.weight(inputs.values) if policy.needs_output_weight else None,
        )

    def shown(self, at: PassState, index: int, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries of the prompt so far, at least its last ones, and its real tokens."""
        return queries, at.reach.valid
