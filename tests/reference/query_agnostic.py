"""Methods that need no question at the prompt's end, and CriticalKV."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import Entry
from .methods import Choice, LayerView, SnapKV
from .scored_methods import Scored
from .selection import average_pool, below, highest, margin


def turned(state: Tensor, position: float, theta: float, channels: slice = slice(None)) -> Tensor:
    """Rotates some channels of a vector to a position; a negative position rotates back.

    The two channels of a pair are apart by half the number of rotated channels.
    """
    places = range(len(state))[channels]
    half = len(places) // 2
    found = state.double().clone()
    for pair, (one, other) in enumerate(zip(places[:half], places[half:], strict=True)):
        angle = position * theta ** (-pair / half)
        x, y = float(state[one]), float(state[other])
        found[one] = x * math.cos(angle) - y * math.sin(angle)
        found[other] = y * math.cos(angle) + x * math.sin(angle)
    return found


def expected_scores(
    queries: Sequence[Sequence[Tensor]],
    query_positions: Sequence[int],
    held: Sequence[Entry],
    *,
    next_position: int,
    scaling: float,
    theta: float,
    num_sinks: int,
    future_len: int,
    epsilon: float,
    channels: slice = slice(None),
) -> list[float]:
    """Returns the expected-attention score of each entry of a KV head; sinks get 0."""
    width = len(held[0].key)
    ahead = range(next_position, next_position + future_len)
    units = torch.eye(width, dtype=torch.float64)
    columns = [
        torch.stack([turned(unit, p, theta, channels) for p in ahead]).mean(dim=0) for unit in units
    ]
    rotation = torch.stack(columns, dim=1)
    behind = [j for j, entry in enumerate(held) if entry.position >= num_sinks]
    total = dict.fromkeys(behind, 0.0)
    for of_head in queries:
        before = [
            turned(query, -position, theta, channels)
            for query, position in zip(of_head, query_positions, strict=True)
            if position >= num_sinks
        ]
        states = torch.stack(before) if before else torch.zeros(1, width, dtype=torch.float64)
        mean = rotation @ states.mean(dim=0)
        spread = torch.zeros(width, width, dtype=torch.float64)
        for state in states - states.mean(dim=0):
            spread += torch.outer(state, state) / len(states)
        spread = rotation @ spread @ rotation.T
        logits = {}
        for j in behind:
            key = held[j].key.double()
            logits[j] = float(key @ mean) * scaling + float(key @ spread @ key) * scaling**2 / 2
        most = max(logits.values(), default=0.0)
        norm = math.fsum(math.exp(logit - most) for logit in logits.values())
        for j, logit in logits.items():
            total[j] += math.exp(logit - most) / norm / len(queries)
    return [
        (total[j] + epsilon) * float(entry.value.double().norm()) if j in total else 0.0
        for j, entry in enumerate(held)
    ]


@dataclass(frozen=True)
class Protected(Scored):
    """Base of methods that keep the last entries, the first positions and the highest scores."""

    num_sinks: int = 4
    positive: bool = False

    def exempt(self, positions: Sequence[int]) -> list[int]:
        return below(positions, self.num_sinks)

    def scale(self, competed: Sequence[float]) -> float | None:
        return None if self.positive else max(map(abs, competed), default=1.0)


@dataclass(frozen=True)
class ExpectedAttention(Protected):
    """Keeps tokens by the attention expected from future queries."""

    positive: bool = True
    future_len: int = 512
    epsilon: float = 0.0

    def scores(self, layer: LayerView, head: int) -> list[float]:
        group = len(layer.queries) // len(layer.entries)
        assert layer.rope_theta is not None
        return expected_scores(
            [list(queries) for queries in layer.queries[head * group : (head + 1) * group]],
            layer.new_positions,
            layer.entries[head],
            next_position=layer.seen,
            scaling=layer.scaling,
            theta=layer.rope_theta,
            num_sinks=self.num_sinks,
            future_len=self.future_len,
            epsilon=self.epsilon,
            channels=layer.rope_channels,
        )


def leverages(keys: Sequence[Tensor], sketch: Tensor) -> list[float]:
    """Returns leverage scores of unrotated keys `[head_dim]`, by a sketch `[head_dim, columns]`."""
    states = torch.stack([key.double() for key in keys])
    states = (states - states.mean(dim=0)) @ sketch.double()
    ridge = 0.01 * torch.eye(states.shape[1], dtype=torch.float64)
    inverse = torch.linalg.inv(states.T @ states + ridge)
    return [float(state @ inverse @ state) for state in states]


def standard(scores: Sequence[float]) -> list[float]:
    """Standardizes scores to mean 0 and deviation 1."""
    mean, deviation = statistics.fmean(scores), statistics.pstdev(scores)
    return [(score - mean) / (deviation + 1e-8) for score in scores]


def chunk_attentions(
    queries: Sequence[Sequence[Tensor]],
    query_positions: Sequence[int],
    held: Sequence[Entry],
    *,
    num_sinks: int,
    chunk_size: int,
    kernel_size: int,
) -> list[float]:
    """Returns each entry's attention from its chunk, times the norm of its value."""
    chunks: dict[int, list[int]] = defaultdict(list)
    for j, entry in enumerate(held):
        chunks[(entry.position - num_sinks) // chunk_size].append(j)
    given = dict.fromkeys(range(len(held)), 0.0)
    asked = set[int]()
    for of_head in queries:
        for query, position in zip(of_head, query_positions, strict=True):
            inside = chunks.get((position - num_sinks) // chunk_size, [])
            if position < num_sinks or not inside:
                continue
            logits = [float(query.double() @ held[j].key.double()) for j in inside]
            weights = torch.tensor(logits, dtype=torch.float64).softmax(dim=0).tolist()
            for j, weight in zip(inside, weights, strict=True):
                given[j] += weight / len(queries) * float(held[j].value.double().norm())
            asked |= set(inside)
    pooled = average_pool([given[j] for j in range(len(held))], kernel_size)
    scaled = iter(standard([pooled[j] for j in sorted(asked)]) if asked else [])
    return [next(scaled) if j in asked else 0.0 for j in range(len(held))]


def gaussian(seed: int, layer_idx: int, head_dim: int, columns: int) -> Tensor:
    """Draws a layer's random projection with the library's random numbers."""
    drawn = torch.Generator().manual_seed(seed * 1_000_003 + layer_idx)
    return torch.randn(head_dim, columns, generator=drawn) / math.sqrt(columns)


@dataclass(frozen=True)
class Compactor(Protected):
    """Keeps tokens by weighted key leverage plus attention within chunks."""

    blending: float = 0.35
    chunk_size: int = 256
    sketch_size: int = 48
    seed: int = 0

    def scores(self, layer: LayerView, head: int) -> list[float]:
        held = layer.entries[head]
        end = max(len(held) - self.window_size, 0)
        inside = [j for j in range(end) if held[j].position >= self.num_sinks]
        if not inside:
            return [0.0] * len(held)
        theta = layer.rope_theta
        assert theta is not None
        keys = [turned(held[j].key, -held[j].position, theta, layer.rope_channels) for j in inside]
        sketch = gaussian(self.seed, layer.layer_idx, len(keys[0]), self.sketch_size)
        group = len(layer.queries) // len(layer.entries)
        last = max(len(layer.new_positions) - self.window_size, 0)
        attention = chunk_attentions(
            [list(rows[:last]) for rows in layer.queries[head * group : (head + 1) * group]],
            layer.new_positions[:last],
            [held[j] for j in inside],
            num_sinks=self.num_sinks,
            chunk_size=self.chunk_size,
            kernel_size=3,
        )
        found = [0.0] * len(held)
        for j, one, two in zip(inside, standard(leverages(keys, sketch)), attention, strict=True):
            found[j] = self.blending * one + two
        return found


def projected(value: Tensor, weight: Tensor, head: int) -> float:
    """Returns the L1 norm of a value projected by `[hidden, heads * value_dim]`."""
    width = len(value)
    of_head = weight[:, head * width : (head + 1) * width].double()
    return math.fsum(abs(float(row @ value.double())) for row in of_head)


@dataclass(frozen=True)
class CriticalKV(SnapKV):
    """A SnapKV that fills part of its budget by saliency times norm of projected values."""

    first_share: float = 0.5
    epsilon: float = 1e-4

    def choose(self, layer: LayerView) -> Choice:
        assert layer.output_weight is not None
        group = len(layer.queries) // len(layer.entries)
        kept, margins = [], []
        budgets = [len(each) for each in super().choose(layer).kept]
        for head, scores in enumerate(self.head_scores(layer)):
            held, count = layer.entries[head], budgets[head]
            fixed = len(held) - len(scores)
            first = highest(scores, max(int(count * self.first_share) - fixed, 0))
            rest = [j for j in range(len(scores)) if j not in first]
            weighed = []
            for j in rest:
                heads = range(head * group, (head + 1) * group)
                norms = [projected(held[j].value, layer.output_weight, each) for each in heads]
                weighed.append((scores[j] + self.epsilon) * math.fsum(norms) / group)
            second = highest(weighed, count - fixed - len(first))
            chosen = sorted(first + [rest[place] for place in second])
            kept.append(chosen + list(range(len(scores), len(held))))
            margins += [margin(scores, first), margin(weighed, second)]
        return Choice(kept, margin=min(margins))
