"""Record what the layers of a cache hold, restore it later, and tell which stand alone."""

from collections.abc import Sequence
from typing import Any

from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layer_contents import LayerContents
from kvpolicy.integrations.transformers.state.tokens import SeenTokens

# What a layer holds: its contents, what it holds in addition, and the record of the tokens seen.
Held = tuple[LayerContents, Any, SeenTokens | None]
LayersHeld = tuple[Held, ...]


def held_by(layers: Sequence[PolicyLayer]) -> LayersHeld:
    """Record what each cache layer holds, so that `hold_again` can restore it."""
    for layer in layers:
        if layer.behind is not None:
            layer.behind()
    held = [(it.contents, it.beside() if it.holds_more else None, it.tokens) for it in layers]
    return tuple(held)


def follow(layers: Sequence[PolicyLayer], tokens: SeenTokens) -> None:
    """Give each cache layer the new record of the tokens that the cache has read."""
    for layer in layers:
        if layer.holds_more:
            layer.follow(tokens)
        else:
            layer.tokens = tokens


def hold_again(layers: Sequence[PolicyLayer], held: LayersHeld) -> None:
    """Return each cache layer to what it held when `held_by` recorded it."""
    for layer, before in zip(layers, held, strict=True):
        layer.restore(*before)


def why_whole(layer: PolicyLayer) -> str | None:
    """Return why a layer cannot be run apart from the other layers; None if it can."""
    reasons = {
        "borrows keys of another": layer.producer is not None,
        "has an indexer": layer.indexed is not None,
        "attends to images": layer.crossing is not None,
        "holds a state beside its keys": layer.attends and layer.recurrent is not None,
        "shows no queries": layer.attends and not layer.facts.shows_queries,
    }
    return next((why for why, holds in reasons.items() if holds), None)
