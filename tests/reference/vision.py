"""Runs a decoder that reads images, one row at a time, dense and without a cache.

The model's own layer modules are called one after another, under masks that are built here. Evicted
tokens are masked for all later queries, and dropped tokens are cut from the hidden states.
Transformers' masks and caches and the model's outer forward are not used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvpolicy.integrations.transformers.surface import CACHE

from . import methods
from .attention import Entry
from .methods import LayerView, pass_on
from .selection import head_mean, highest, margin, max_pool


@dataclass(frozen=True)
class VisionRow:
    """One row of embeddings, with everything that the decoder needs to read it.

    Attributes:
        decoder: the text model, with eager attention, so that its attention can be read.
        lm_head: from hidden states to logits.
        embeddings: `[len, hidden]`, with the images' features at the images' tokens.
        positions: int64 `[axes, len]`, what the rotary embedding reads.
        blocks: for each token the block whose tokens all see each other; -1 for none.
        added: by layer, features `[len, hidden]` that are added to its output.
        windows: by layer, positions that a query sees at most, itself included; None for all.
    """

    decoder: Any
    lm_head: nn.Module
    embeddings: Tensor
    positions: Tensor
    blocks: Sequence[int]
    added: Mapping[int, Tensor]
    windows: Sequence[int | None]


@dataclass(frozen=True)
class LayerSeen:
    """The data of one layer, after it has read a prompt, on which a method bases its choice.

    Attributes:
        layer_idx: which decoder layer.
        held: per KV head the positions that the prompt's queries could see, ascending.
        new: positions of the prompt's tokens that reached the layer, ascending.
        attention: `[query_heads, len(new), end]`, the layer's own attention, by the key's position.
        end: tokens of the row so far.
        window: tokens that the layer sees; None for all.
    """

    layer_idx: int
    held: Sequence[Sequence[int]]
    new: Sequence[int]
    attention: Tensor
    end: int
    window: int | None

    def in_window(self) -> list[list[int]] | None:
        """Returns the positions that the next token can still see; None if it can see all."""
        if self.window is None or self.end <= self.window:
            return None
        return [[at for at in head if at > self.end - self.window] for head in self.held]


@dataclass(frozen=True)
class VisionChoice:
    """A choice at one layer: positions kept per KV head, positions passed on, and score gap."""

    kept: Sequence[Sequence[int]]
    passed: Sequence[int] | None = None
    margin: float = inf


class VisionMethod(Protocol):
    """Base of methods, which choose the positions to keep and to pass on."""

    def choose(self, prompt: int, layer: LayerSeen) -> VisionChoice:
        """Chooses at one layer after prompt number `prompt` of the row."""


@dataclass(frozen=True)
class KeepAll:
    """Keeps everything and passes everything on."""

    def choose(self, prompt: int, layer: LayerSeen) -> VisionChoice:
        return VisionChoice(layer.held)


@dataclass(frozen=True)
class Observed:
    """Repeats the choices that another implementation made.

    Attributes:
        kept: positions kept, by prompt, layer and KV head.
        passed: by prompt, the layers that dropped tokens, and the positions they passed on.
    """

    kept: Sequence[Sequence[Sequence[Sequence[int]]]]
    passed: Sequence[Mapping[int, Sequence[int]]]

    def choose(self, prompt: int, layer: LayerSeen) -> VisionChoice:
        kept = self.kept[prompt][layer.layer_idx]
        for head, held in zip(kept, layer.held, strict=True):
            assert set(head) <= set(held), f"layer {layer.layer_idx} keeps what it never held"
        passed = self.passed[prompt].get(layer.layer_idx)
        return VisionChoice(kept, passed)


@dataclass(frozen=True)
class LayerShown(LayerView):
    """A layer as the methods of text are shown it, with `LayerSeen.attention` for its queries."""

    attention: Tensor = field(kw_only=True)


@dataclass(frozen=True)
class OfAttention(methods.SnapKV):
    """A SnapKV by the attention that a layer itself computed."""

    def saliency(self, layer: LayerView) -> list[list[float]]:
        assert isinstance(layer, LayerShown)
        group, rows = len(layer.queries) // len(layer.entries), []
        for head, attention in enumerate(layer.attention):
            held = [entry.position for entry in layer.entries[head // group]]
            sums = attention[-self.window_size :, held].to(torch.float64).sum(dim=0).tolist()
            rows.append(max_pool(sums[: max(0, len(held) - self.window_size)], self.kernel_size))
        return rows


def shown(layer: LayerSeen) -> LayerShown:
    """Returns a layer as the methods of text are shown it, without queries, keys and values."""
    none = torch.empty(0)
    entries = [[Entry(at, none, none) for at in head] for head in layer.held]
    queries = [none] * len(layer.attention)
    return LayerShown(
        layer.layer_idx, 0, queries, layer.new, entries, layer.end, 1.0, attention=layer.attention
    )


def positions_kept(layer: LayerSeen, choice: methods.Choice) -> list[list[int]]:
    """Returns a choice's positions, or those of the window if the layer has one that is full."""
    within = layer.in_window()
    pairs = zip(layer.held, choice.kept, strict=True)
    return within or [[held[index] for index in kept] for held, kept in pairs]


@dataclass(frozen=True)
class StreamingLLM:
    """Keeps the first and the most recent positions; see `reference.StreamingLLM`."""

    rate: float

    def choose(self, prompt: int, layer: LayerSeen) -> VisionChoice:
        choice = methods.StreamingLLM(self.rate).choose(shown(layer))
        return VisionChoice(positions_kept(layer, choice))


@dataclass(frozen=True)
class SnapKV:
    """Keeps what `reference.SnapKV` does, and passes on what `reference.FastKV` does."""

    rate: float | None = None
    window: int = 8
    kernel: int = 7
    tokens: int | None = None
    tsp_layer: int | None = None
    tsp_rate: float | None = None
    tsp_tokens: int | None = None

    def choose(self, prompt: int, layer: LayerSeen) -> VisionChoice:
        method = OfAttention(self.rate, self.window, self.kernel, self.tokens)
        choice = method.choose(shown(layer))
        kept = positions_kept(layer, choice)
        gap = inf if layer.in_window() else choice.margin
        if layer.layer_idx != self.tsp_layer:
            return VisionChoice(kept, None, gap)
        going, new_gap = pass_on(method, shown(layer), self.tsp_rate, self.tsp_tokens)
        passed = None if len(going) == len(layer.new) else [layer.new[index] for index in going]
        return VisionChoice(kept, passed, min(gap, new_gap))


@dataclass(frozen=True)
class VisualTokens:
    """Keeps everything but, after some layers, drops part of the image tokens.

    Attributes:
        images: positions of the tokens of images.
        stages: by layer the fraction that is passed on of the images' tokens that are new there.
        observers: last queries whose attention is summed; None for all of the prompt's.
    """

    images: frozenset[int]
    stages: Mapping[int, float]
    observers: int | None = None

    def choose(self, prompt: int, layer: LayerSeen) -> VisionChoice:
        kept = layer.in_window() or layer.held
        competing = [at for at in layer.new if at in self.images and at != layer.new[-1]]
        if layer.layer_idx not in self.stages or not competing:
            return VisionChoice(kept)
        first = 0 if self.observers is None else len(layer.new) - self.observers
        observed = layer.attention[:, first:].to(torch.float64).sum(dim=1)
        scores = head_mean(observed[:, competing].tolist())
        chosen = highest(scores, int(len(competing) * self.stages[layer.layer_idx]))
        going = {competing[i] for i in chosen}
        passed = [at for at in layer.new if at in going or at not in competing]
        return VisionChoice(kept, passed, margin(scores, chosen))


@dataclass
class Outcome:
    """The results of one row.

    Attributes:
        logits: `[tokens that reached the end, vocab]`.
        reached: positions of those tokens.
        kept: by prompt, layer and KV head, positions kept.
        passed: by prompt and layer, positions that went on, for layers that dropped.
        margin: the smallest margin of any choice.
    """

    logits: Tensor
    reached: list[int]
    kept: list[list[list[list[int]]]] = field(default_factory=list)
    passed: list[dict[int, list[int]]] = field(default_factory=list)
    margin: float = inf

    def at(self, positions: Sequence[int]) -> Tensor:
        """Returns logits `[len(positions), vocab]` of tokens that reached the last layer."""
        return self.logits[[self.reached.index(position) for position in positions]]


@torch.no_grad()
def read(row: VisionRow, prompts: Sequence[tuple[int, int]], method: VisionMethod) -> Outcome:
    """Runs a whole row, prompts and answers, through all layers."""
    alive = list(range(len(row.embeddings)))
    hidden = row.embeddings
    outcome = Outcome(hidden, alive, [[] for _ in prompts], [{} for _ in prompts])
    for layer_idx in range(len(row.decoder.layers)):
        kept: list[Sequence[Sequence[int]]] = []
        going = set(alive)
        for number, (start, end) in enumerate(prompts):
            seen = _look(row, layer_idx, hidden, alive, prompts[:number], kept, (start, end))
            choice = method.choose(number, seen)
            kept.append(choice.kept)
            outcome.kept[number].append([list(head) for head in choice.kept])
            outcome.margin = min(outcome.margin, choice.margin)
            if choice.passed is not None:
                assert set(choice.passed) <= set(seen.new), "what goes on has reached the layer"
                outcome.passed[number][layer_idx] = list(choice.passed)
                going -= set(seen.new) - set(choice.passed)
        visible = _visible(row, layer_idx, alive, prompts, kept)
        hidden, _ = _run_layer(row, layer_idx, hidden, alive, visible)
        if layer_idx in row.added:
            hidden = hidden + row.added[layer_idx][alive]
        hidden = hidden[[at in going for at in alive]]
        alive = [at for at in alive if at in going]
    outcome.logits = row.lm_head(row.decoder.norm(hidden[None])[0])
    outcome.reached = alive
    return outcome


def _look(
    row: VisionRow,
    layer_idx: int,
    hidden: Tensor,
    alive: Sequence[int],
    earlier: Sequence[tuple[int, int]],
    kept: Sequence[Sequence[Sequence[int]]],
    prompt: tuple[int, int],
) -> LayerSeen:
    """Runs a layer up to the prompt's end; returns the data for the method's choice."""
    start, end = prompt
    present = [at for at in alive if at < end]
    visible = _visible(row, layer_idx, present, earlier, kept)
    count = len(present)
    _, weights = _run_layer(row, layer_idx, hidden[:count], present, visible)
    new = [at for at in present if at >= start]
    by_position = torch.zeros(len(weights), len(new), end)
    by_position[:, :, present] = weights[:, count - len(new) :]
    # All heads hold the tokens after the last choice, and what that choice kept.
    since = earlier[-1][1] if earlier else 0
    heads = row.decoder.config.num_key_value_heads
    old = kept[-1] if kept else [[]] * heads
    held = [sorted([*head, *[at for at in present if at >= since]]) for head in old]
    return LayerSeen(layer_idx, held, new, by_position, end, row.windows[layer_idx])


def _visible(
    row: VisionRow,
    layer_idx: int,
    present: Sequence[int],
    prompts: Sequence[tuple[int, int]],
    kept: Sequence[Sequence[Sequence[int]]],
) -> Tensor:
    """Returns a mask `[query_heads, len(present), len(present)]` of visible keys.

    Of the tokens before the last choice, a query sees those that were kept. Of the newer ones, it
    sees all up to itself, and all of its own block. Then the sliding window limits both.
    """
    config = row.decoder.config
    group = config.num_attention_heads // config.num_key_value_heads
    window = row.windows[layer_idx] or len(row.blocks)
    heads = []
    for head in range(config.num_key_value_heads):
        lines = []
        for query in present:
            block = row.blocks[query]
            done = [number for number, (_, end) in enumerate(prompts) if end <= query]
            since = prompts[done[-1]][1] if done else 0
            seen = set(kept[done[-1]][head]) if done else set()
            seen |= {key for key in present if since <= key <= query}
            seen |= {key for key in present if key >= since and row.blocks[key] == block >= 0}
            seen = {key for key in seen if query - key < window} | {query}
            lines.append([key in seen for key in present])
        heads.append(torch.tensor(lines))
    return torch.stack(heads).repeat_interleave(group, dim=0)


def _run_layer(
    row: VisionRow, layer_idx: int, hidden: Tensor, present: Sequence[int], visible: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs one layer module over the present tokens and returns its output and attention."""
    layer = row.decoder.layers[layer_idx]
    lowest = torch.finfo(torch.float32).min
    positions = row.positions[:, None, list(present)]  # [axes, 1, len]
    if len(positions) == 1:
        positions = positions[0]
    arguments = []
    if row.windows[layer_idx] is not None or any(row.windows):
        arguments = [row.decoder.config.layer_types[layer_idx]]
    shown: list[Tensor] = []

    def see(module: nn.Module, args: Any, output: Any) -> None:
        shown.append(output[1][0])

    handle = layer.self_attn.register_forward_hook(see)
    try:
        output = layer(
            hidden[None],
            attention_mask=torch.where(visible, 0.0, lowest)[None],
            position_embeddings=row.decoder.rotary_emb(hidden[None], positions, *arguments),
            position_ids=None,
            **{CACHE: None},
        )
    finally:
        handle.remove()
    return output[0], shown[0]
