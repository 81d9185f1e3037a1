"""Methods that read the saliency of earlier layers."""

from collections.abc import Iterator
from dataclasses import dataclass

from .methods import Choice, LayerView, SnapKV
from .selection import budget, head_mean, margin, window_and_highest


@dataclass(frozen=True)
class LookingBack(SnapKV):
    """A SnapKV that adds the saliency of earlier layers, averaged over heads."""

    carried_on: float = 0.0
    selecting: int = 0
    passing: int = 0
    rates: tuple[tuple[int, float], ...] = ()
    keeps: bool = False

    def choose(self, layer: LayerView) -> Choice:
        at = layer.layer_idx
        notes: dict[int, dict[int, float]] = layer.notes  # what each position got
        scores = self.saliency(layer)
        group = len(scores) // len(layer.entries)
        held = [entries for entries in layer.entries for _ in range(group)]
        for row, entries in zip(scores, held, strict=True):
            for index in self._new(layer, row, len(entries)):
                before = notes.get(at - 1, {})
                row[index] += self.carried_on * before.get(entries[index].position, 0.0)
        new_len = len(layer.new_positions)
        competing = max(new_len - self.window_size, 0)
        means = head_mean(
            [
                [row[index] for index in self._new(layer, row, len(entries))]
                for row, entries in zip(scores, held, strict=True)
            ]
        )
        notes[at] = dict.fromkeys(layer.new_positions, 0.0)
        notes[at].update(zip(layer.new_positions, means, strict=False))
        kept, margins = [], []
        for head, entries in enumerate(layer.entries):
            of_head = head_mean(scores[head * group : (head + 1) * group])
            for index in self._new(layer, of_head, len(entries)):
                found = self._before(layer, self.selecting, entries[index].position)
                of_head[index] += min(found, default=0.0)
            count = self.count(layer, len(entries), len(entries) - len(of_head))
            if self.keeps:
                count = len(entries)
            kept.append(window_and_highest(of_head, len(entries), count))
            margins.append(margin(of_head, kept[-1]))
        rate = dict(self.rates).get(at)
        if rate is None:
            return Choice(kept, margin=min(margins))
        largest = [
            max([mean, *self._before(layer, self.passing, position)])
            for mean, position in zip(means, layer.new_positions, strict=False)
        ]
        count = budget(
            rate, None, seen=layer.seen, available=new_len, protected=new_len - competing
        )
        passed = window_and_highest(largest, new_len, count)
        return Choice(kept, passed, min(*margins, margin(largest, passed)))

    def _before(self, layer: LayerView, count: int, position: int) -> list[float]:
        layers = range(max(layer.layer_idx - count, 0), layer.layer_idx)
        return [layer.notes[at][position] for at in layers]

    def _new(self, layer: LayerView, row: list[float], length: int) -> Iterator[int]:
        """Returns the indices of new tokens with a score among a head's entries."""
        return iter(range(max(length - len(layer.new_positions), 0), len(row)))
