"""`Part`, the base of scorers, selectors and propagation policies."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.short_repr import brief


class Part:
    """Base of scorers, selectors and propagation policies: declares which layer inputs it reads."""

    paper: ClassVar[str] = ""

    def __str__(self) -> str:
        return brief(self)

    @property
    def history_layers(self) -> int:
        """The number of earlier layers whose saliency this part reads; 0 for none.

        Only layers at which the policy chooses count.
        """
        return 0

    @property
    def needs_rotary(self) -> bool:
        """True if this part reads the layer's rotary embedding, `LayerInputs.rotary`."""
        return False

    @property
    def needs_output_weight(self) -> bool:
        """True if this part reads the attention output weights, `LayerInputs.output_weight`."""
        return False
