"""Record the facts of a model and its policy, and the settings of one forward."""

from __future__ import annotations

from typing import Any

import attrs

from kvpolicy.declarations import declares
from kvpolicy.integrations.transformers.forward.layer_probe import LayerProbe
from kvpolicy.integrations.transformers.forward.output_order import AttendedKeys
from kvpolicy.integrations.transformers.model.masks import FLASH
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.model.quirks import ModelQuirks
from kvpolicy.policy import CachePolicy


@attrs.define
class OutputForm:
    """What a decoder layer returns: hidden states, or a tuple that begins with them.

    Args:
        others: Number of the tuple's other entries; None if there is no tuple.
        known: Whether a layer has run, which showed it.
    """

    others: int | None = None
    known: bool = False

    def note(self, output: Any) -> None:
        """Learn from a layer's output."""
        self.others, self.known = len(output) - 1 if isinstance(output, tuple) else None, True

    def of(self, hidden: Any) -> Any:
        """Return hidden states in the form of a layer's output."""
        return hidden if self.others is None else (hidden, *[None] * self.others)


class ModelFacts:
    """A record of what is known of a model and its policy while a cache is attached.

    Args:
        policy: The policy, with the layers that it leaves open chosen for the model.

    Attributes:
        windows: Each layer's sliding window or chunk; None if it sees all tokens.
        temperatures: By layer, how its queries depend on counted positions; None if they do not.
        causal: Whether a token sees no later token in a layer without a mask; else it sees all of a
            prompt.
        rotary: The decoder's rotary embedding, for index keys that are rotated late; None without.
        acting: The layers after which the policy drops tokens, or restarts.
    """

    def __init__(self, parts: ModelParts, policy: CachePolicy, quirks: ModelQuirks) -> None:
        self.parts, self.policy, self.quirks = parts, policy, quirks
        self.form = OutputForm()
        self.windows, self.temperatures = parts.windows, parts.temperatures
        self.causal = parts.causal
        self.rotary: Any = getattr(parts.decoder, "rotary_emb", None)
        self.acting = policy.propagation.acting_layers(parts.num_layers)
        self.restarts = policy.propagation.restarts


@attrs.frozen(eq=False)
class Call:
    """The settings of one forward of the decoder, read from its arguments.

    Args:
        implementation: The model's attention implementation, which may change between two calls.
        own_masks: Whether the model makes its masks outside the decoder, so that they may not be
            causal.
        narrows: Whether a layer may be run for only some of the tokens that reach it.
        keep_last: Number of last tokens whose outputs are asked for; None for all tokens that reach
            the end.
        attended: A record of the keys each layer attends to; None if attention weights are not
            asked for.
        probe: Finds the rotary embeddings and output projections that the policy's parts need; None
            if they need none.
    """

    model: ModelFacts
    implementation: str
    own_masks: bool
    narrows: bool
    keep_last: int | None
    records: bool
    attended: AttendedKeys | None
    probe: LayerProbe | None

    @staticmethod
    def of(
        model: ModelFacts, arguments: dict[str, Any], *, own_masks: bool, keep_last: int | None
    ) -> Call:
        """Read the settings of a forward from the decoder's arguments."""
        parts, quirks = model.parts, model.quirks
        implementation = parts.implementation
        weights, states = (
            bool(arguments.get(name, getattr(parts.config, name, False)))
            for name in ("output_attentions", "output_hidden_states")
        )
        # Narrowing replaces flash attention by sdpa, which has neither softcap nor sinks. And
        # Transformers records hidden states as layers get them, which narrowing would cut.
        replaced = implementation in FLASH and not parts.plain_scores
        whole = weights or states or replaced or not parts.passes_on
        attending = [i for i, each in enumerate(parts.attentions) if each is not None]
        return Call(
            model,
            implementation,
            own_masks,
            narrows=quirks.narrows and not whole,
            keep_last=None if states else keep_last,
            records=states,
            attended=AttendedKeys(attending) if weights else None,
            probe=LayerProbe.of(parts, model.policy),
        )


def keeps_everything(policy: CachePolicy, num_layers: int) -> bool:
    """True if a policy never evicts and never drops a token of any prompt."""
    selector = policy.selector
    whole = selector.budget is not None and selector.budget.rate == 1
    keeps = whole or declares(selector, "keeps_all")
    return keeps and not policy.propagation.acting_layers(num_layers)
