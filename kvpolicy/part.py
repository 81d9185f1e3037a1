"""`Part`, the base of scorers, selectors and propagation policies."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.short_repr import brief


class Part:
    """Base of scorers, selectors and propagation policies: declares which layer inputs it reads.

    What it declares here is given to it in `LayerContext.layer`, and to no other part. A part that
    is made of others returns these as `inner_parts`, and reads what any of them reads. `Scorer`
    adds ``num_queries`` and ``state_size``; selectors and propagation policies ``needs_saliency``.
    """

    paper: ClassVar[str] = ""

    def __str__(self) -> str:
        return brief(self)

    @property
    def inner_parts(self) -> tuple[Part, ...]:
        """The parts that this part wraps or combines."""
        return ()

    @property
    def history_layers(self) -> int:
        """The number of earlier layers whose saliency this part reads; 0 for none.

        Only layers at which the policy chooses count.
        """
        return max((part.history_layers for part in self.inner_parts), default=0)

    @property
    def needs_rotary(self) -> bool:
        """True if this part reads the layer's rotary embedding, `LayerInputs.rotary`."""
        return any(part.needs_rotary for part in self.inner_parts)

    @property
    def needs_output_weight(self) -> bool:
        """True if this part reads the attention output weights, `LayerInputs.output_weight`."""
        return any(part.needs_output_weight for part in self.inner_parts)
