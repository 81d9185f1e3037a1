"""Tokens dropped after more than one layer."""

from dataclasses import dataclass

from .methods import Choice, LayerView, SnapKV, pass_on


@dataclass(frozen=True)
class Staged(SnapKV):
    """Keeps as SnapKV; after each stage's layer only the most salient of the new tokens go on.

    Attributes:
        stages: pairs of a layer, each of them once, and the fraction of all tokens seen that goes
            on after it, of those new tokens that reached it.
    """

    stages: tuple[tuple[int, float], ...] = ()

    def choose(self, layer: LayerView) -> Choice:
        """As SnapKV; at a stage's layer also the tokens to pass on."""
        rates = dict(self.stages)
        assert len(rates) == len(self.stages), "one stage for a layer"
        choice = super().choose(layer)
        if layer.layer_idx not in rates:
            return choice
        passed, gap = pass_on(self, layer, rates[layer.layer_idx])
        return Choice(choice.kept, passed, min(choice.margin, gap))
