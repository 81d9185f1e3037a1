"""Find where a layer with attention and a state takes its two masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

# Names of the attention mask; if a layer has several of them, the first one counts.
_OF_ATTENTION = ("causal_mask", "causal", "attention_mask")


@attrs.frozen
class MaskArguments:
    """The argument names of a hybrid layer's two masks: its attention's and its recurrence's.

    Args:
        together: Whether both masks are entries of one dictionary, the ``attention_mask``.
    """

    attention: str
    states: tuple[str, ...]
    together: bool

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> MaskArguments:
        """Find the names of the two masks among a hybrid layer's arguments."""
        both = arguments.get("attention_mask")
        names = [name for name in arguments if name.endswith("mask")]
        if isinstance(both, dict):
            names = list(both)
        attention = next((name for name in _OF_ATTENTION if name in names), "attention_mask")
        states = tuple(name for name in names if name != attention)
        return MaskArguments(attention, states, isinstance(both, dict))

    def taken(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the layer's arguments with its attention mask as the only ``attention_mask``."""
        masks = arguments["attention_mask"] if self.together else arguments
        others = {name: each for name, each in arguments.items() if name not in self.states}
        others.pop(self.attention, None)
        return {**others, "attention_mask": masks.get(self.attention)}

    def given(self, arguments: Mapping[str, Any], of_states: Any) -> dict[str, Any]:
        """Return `taken` arguments in the layer's own form, with a mask for its states added."""
        others = {name: each for name, each in arguments.items() if name != "attention_mask"}
        masks = {
            self.attention: arguments["attention_mask"],
            **dict.fromkeys(self.states, of_states),
        }
        return {**others, "attention_mask": masks} if self.together else {**others, **masks}
