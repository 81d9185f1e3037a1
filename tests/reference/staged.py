"""A method that drops tokens after more than one layer."""

from dataclasses import dataclass

from .methods import Choice, LayerView, SnapKV, pass_on


@dataclass(frozen=True)
class Staged(SnapKV):
    """A SnapKV that passes on only the most salient new tokens after each stage's layer."""

    stages: tuple[tuple[int, float], ...] = ()

    def choose(self, layer: LayerView) -> Choice:
        rates = dict(self.stages)
        assert len(rates) == len(self.stages), "one stage for a layer"
        choice = super().choose(layer)
        if layer.layer_idx not in rates:
            return choice
        passed, gap = pass_on(self, layer, rates[layer.layer_idx])
        return Choice(choice.kept, passed, min(choice.margin, gap))
