"""One budget for all layers and heads, and a second reading of the prompt for its scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

from torch import Tensor

from .attention import Entry, attention_probabilities
from .decoder import decoder_layers, embed
from .droppers import CLAA
from .generation import ReferenceState
from .methods import FastKV, LayerView, SnapKV
from .selection import average_pool, below, budget, highest, margin

# By layer and KV head, one number for each entry.
Scores = list[list[list[float]]]


@dataclass(frozen=True)
class Together:
    """Scores all layers first, then splits one budget over all layers and heads.

    Attributes:
        base: the method that gives the saliency, and passes tokens on if it can; None if
            `repeat` scores.
        repeat: how the prompt is read again; None if `base` scores.
        uniform: whether each head fills its own budget.
        apart: whether earlier entries and those of the last turn fill their own shares.
        spans: if given, heads rank tokens by the largest standardized score of any head of any
            layer, averaged over this many neighbours.
        whole: positions below this are kept beside the budget, which counts only later tokens.
    """

    retention_rate: float | None = 0.3
    retention_tokens: int | None = None
    window_size: int = 0
    protect: int = 0
    base: SnapKV | None = None
    repeat: "Repeat | None" = None
    uniform: bool = False
    apart: bool = False
    spans: int | None = None
    whole: int = 0

    def choose_all(
        self, layers: Sequence[Sequence[Sequence[Entry]]], scores: Scores, seen: int, new: int
    ) -> tuple[list[list[list[int]]], float]:
        """Returns the entries to keep by layer and head, and the smallest score gap.

        Of the tokens seen, `new` are those of the last turn.
        """
        fixed: list[list[list[int]]] = []
        places: list[tuple[int, int, int]] = []
        counts: list[list[int]] = []
        for layer, heads in enumerate(layers):
            fixed.append([])
            counts.append([])
            for head, held in enumerate(heads):
                given = below([entry.position for entry in held], self.whole)
                first = below([entry.position for entry in held], self.protect)
                tail = range(max(len(held) - self.window_size, 0), len(held))
                always = sorted({*given, *first, *tail})
                fixed[-1].append(always)
                count = budget(
                    self.retention_rate,
                    self.retention_tokens,
                    seen=max(seen - self.whole, 0),
                    available=self.reached(held, seen, new),
                    protected=len(always) - len(given),
                )
                counts[-1].append(
                    (count if len(held) > len(given) else 0) - len(always) + len(given)
                )
                places += [
                    (layer, head, index) for index in range(len(held)) if index not in always
                ]
        if self.spans is not None:
            scores = self.of_any_head(layers, scores, fixed, self.spans)
        groups = [(places, min(sum(map(sum, counts)), len(places)))]
        if self.uniform:
            owners = sorted({place[:2] for place in places})
            groups = [
                (
                    own := [place for place in places if place[:2] == owner],
                    min(counts[owner[0]][owner[1]], len(own)),
                )
                for owner in owners
            ]
        elif self.apart:
            groups = self.turns_apart(layers, places, fixed, groups[0][1], seen, new)
        gap = inf
        for group, free in groups:
            found = [scores[layer][head][index] for layer, head, index in group]
            taken = highest(found, free)
            gap = min(gap, margin(found, taken))
            for place in taken:
                layer, head, index = group[place]
                fixed[layer][head].append(index)
        return [[sorted(head) for head in heads] for heads in fixed], gap

    def reached(self, held: Sequence[Entry], seen: int, new: int) -> int:
        """Returns the number of entries that a head would hold if it had evicted none.

        Positions below `whole` do not count.
        """
        earlier = max(seen - new - self.whole, 0)
        return earlier + sum(entry.position >= max(seen - new, self.whole) for entry in held)

    def turns_apart(
        self,
        layers: Sequence[Sequence[Sequence[Entry]]],
        places: Sequence[tuple[int, int, int]],
        fixed: list[list[list[int]]],
        free: int,
        seen: int,
        new: int,
    ) -> list[tuple[list[tuple[int, int, int]], int]]:
        """Returns the earlier entries and the turn's own, each with how many of them to choose."""

        def is_new(place: tuple[int, int, int]) -> bool:
            layer, head, index = place
            return layers[layer][head][index].position >= seen - new

        always = [
            (layer, head, index)
            for layer, heads in enumerate(fixed)
            for head, own in enumerate(heads)
            for index in own
        ]
        later = [place for place in places if is_new(place)]
        earlier = [place for place in places if not is_new(place)]
        share = (free + len(always)) * new // seen - sum(map(is_new, always))
        own = min(max(share, 0), len(later))
        # Places that earlier entries cannot fill.
        own = max(own, free - len(earlier))
        own = min(own, free)
        return [(earlier, free - own), (later, own)]

    def of_any_head(
        self,
        layers: Sequence[Sequence[Sequence[Entry]]],
        scores: Scores,
        fixed: list[list[list[int]]],
        spans: int,
    ) -> Scores:
        """Returns, for each entry, how far its position stands out in any head of any layer."""
        best: dict[int, float] = {}
        for heads, of_layer, always in zip(layers, scores, fixed, strict=True):
            for held, row, kept in zip(heads, of_layer, always, strict=True):
                free = [score for index, score in enumerate(row) if index not in kept]
                mean = sum(free) / max(len(free), 1)
                spread = sqrt(sum((score - mean) ** 2 for score in free) / max(len(free), 1))
                for index, entry in enumerate(held):
                    far = 0.0 if index in kept else (row[index] - mean) / (spread + 1e-8)
                    best[entry.position] = max(best.get(entry.position, -inf), far)
        order = sorted(best)
        means = average_pool([best[position] for position in order], spans)
        ranking = dict(zip(order, means, strict=True))
        return [[[ranking[entry.position] for entry in held] for held in heads] for heads in layers]


@dataclass(frozen=True)
class Repeat:
    """The chunks and instructions with which a prompt is read a second time.

    Attributes:
        chunk_size: tokens of the context at a time.
        num_sinks: positions below this are keys of every chunk's softmax.
        overlap: number of last tokens of the chunk before that are repeated first.
        first: ids before the first chunk.
        later: ids before every other.
        answer: ids between the overlap and the chunk.
        begin: first position that is repeated.
    """

    chunk_size: int
    num_sinks: int
    overlap: int
    first: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    begin: int = 0


class TogetherState(ReferenceState):
    """The context of one row under `Together`, whose layers choose after all were scored."""

    method: Together

    def __init__(self, model: object, method: object) -> None:
        super().__init__(model, method)  # type: ignore[arg-type]
        self.ids: list[int] = []

    def _decode(self, token_id: int) -> Tensor:
        self.ids.append(token_id)
        return super()._decode(token_id)

    def _act(
        self, new_token_ids: Sequence[int]
    ) -> tuple[Tensor, dict[int, list[int]], list[list[int]], float]:
        positions = list(range(self.seen, self.seen + len(new_token_ids)))
        self.seen += len(new_token_ids)
        self.rotary += len(new_token_ids)
        self.ids += new_token_ids
        self.notes = {}  # a method remembers nothing of other prompts
        hidden = embed(self.model, new_token_ids)
        reached, dropped, views, gap = [], {}, [], inf
        for layer_idx in range(len(self.cache)):
            reached.append(positions)
            hidden, queries, grown = self._layer(layer_idx, hidden, positions, positions)
            self.cache[layer_idx] = grown
            views.append(self._view(layer_idx, queries, positions, grown))
            if isinstance(self.method.base, FastKV | CLAA):
                choice = self.method.base.choose(views[-1])
                if choice.passed is not None:
                    hidden, before = hidden[choice.passed], positions
                    positions = [positions[index] for index in choice.passed]
                    gap = choice.margin
                    if positions != before:
                        dropped[layer_idx] = positions
        logits = self._logits(hidden[-1])
        scores = self._repeated() if self.method.base is None else self._scored(views)
        new = len(new_token_ids)
        kept, choice_gap = self.method.choose_all(self.cache, scores, self.seen, new)
        self.cache = [
            [[held[index] for index in own] for held, own in zip(heads, of_layer, strict=True)]
            for heads, of_layer in zip(self.cache, kept, strict=True)
        ]
        return logits, dropped, reached, min(gap, choice_gap)

    def _scored(self, views: Sequence[LayerView]) -> Scores:
        """Returns the scores of all entries; entries of the window get 0."""
        assert self.method.base is not None
        found = []
        for view in views:
            rows = self.method.base.head_scores(view)
            pairs = zip(rows, view.entries, strict=True)
            found.append([row + [0.0] * (len(held) - len(row)) for row, held in pairs])
        return found

    def _repeated(self) -> Scores:
        """Returns the largest attention that any repeated token gives each entry."""
        how = self.method.repeat
        assert how is not None
        found = [[[-1.0] * len(held) for held in heads] for heads in self.cache]
        for start in range(how.begin, len(self.ids), how.chunk_size):
            stop = min(start + how.chunk_size, len(self.ids))
            ahead = self.ids[max(start - how.overlap, how.begin) : start]
            instruction = how.first if start == how.begin else how.later
            ids = [*instruction, *ahead, *how.answer, *self.ids[start:stop]]
            places = list(range(self.seen, self.seen + len(ids)))
            hidden = embed(self.model, ids)
            for layer_idx in range(len(self.cache)):
                hidden, queries, grown = self._layer(layer_idx, hidden, places, places)
                scaling = float(decoder_layers(self.model)[layer_idx].self_attn.scaling)
                group = len(queries) // len(grown)
                for head, held in enumerate(grown):
                    shown = [
                        index
                        for index, entry in enumerate(held)
                        if entry.position < how.num_sinks
                        or start <= entry.position < stop
                        or entry.position >= self.seen
                    ]
                    entries = [held[index] for index in shown]
                    for own in queries[head * group : (head + 1) * group]:
                        given = attention_probabilities(own, places, entries, scaling)
                        for column, index in enumerate(shown):
                            if start <= held[index].position < stop:
                                most = float(given[:, column].max())
                                own_scores = found[layer_idx][head]
                                own_scores[index] = max(own_scores[index], most)
        return found
