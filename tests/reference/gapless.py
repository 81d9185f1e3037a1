"""A context without position gaps: each key is rotated by its index among the held keys.

Keys are stored unrotated. StreamingLLM's own code does the same, and evicts at every step. Here the
policy acts only at the end of a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .attention import Entry
from .decoder import geometry, project, rotate
from .generation import LayerOutput, ReferenceState


@dataclass(frozen=True)
class PlainEntry(Entry):
    """An entry that also holds its key before rotary embedding.

    Attributes:
        plain: the unrotated key `[head_dim]`.
    """

    plain: Tensor


class GaplessState(ReferenceState):
    """A `ReferenceState` whose rotary positions are indices among the entries that a head holds.

    Attributes:
        farthest: the largest rotary position used so far.
    """

    farthest = 0

    def _layer(
        self, layer_idx: int, hidden: Tensor, positions: Sequence[int], rotary: Sequence[int]
    ) -> LayerOutput:
        theta = geometry(self.model).rope_theta
        held = self.cache[layer_idx]
        (before,) = {len(entries) for entries in held}
        places = list(range(before, before + len(positions)))
        self.farthest = max(self.farthest, places[-1])
        _, unturned = project(self.model, layer_idx, hidden, positions, [0] * len(positions))
        queries, _ = project(self.model, layer_idx, hidden, positions, places)
        grown: list[list[Entry]] = []
        for old, new in zip(held, unturned, strict=True):
            every = [(e.position, _plain(e), e.value) for e in old]
            every += [(e.position, e.key, e.value) for e in new]
            grown.append(
                [
                    PlainEntry(position, rotate(key, place, theta), value, key)
                    for place, (position, key, value) in enumerate(every)
                ]
            )
        return self._attended(layer_idx, hidden, queries, positions, grown), queries, grown


def _plain(entry: Entry) -> Tensor:
    assert isinstance(entry, PlainEntry)
    return entry.plain
