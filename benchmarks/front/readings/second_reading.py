"""Saliencies from a second reading of the document, or of parts of it.

The second reading feeds tokens at positions behind the document. They attend to all of the document
and to each other, as in KVzip with one chunk; the largest attention that a key of the document
receives is its saliency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.front.readings.one_reading import Saliency, fixed, shifted
from benchmarks.front.readings.reading import Reading, grouped, rotated, states


def whole(reading: Reading) -> Saliency:
    """Return KVzip's saliency: the whole document is repeated."""
    return _by_row(reading, lambda row: _again(row, row.hidden[0], row.places))


def every_second(reading: Reading, step: int = 2) -> Saliency:
    """Return the saliency if every second token is repeated, at its own distance."""

    def of(row: Reading) -> list[Tensor]:
        return _again(row, row.hidden[0][:, step - 1 :: step], row.places[step - 1 :: step])

    return _by_row(reading, of)


def fewer_behind(reading: Reading, layer: int, part: float) -> Saliency:
    """Return the saliency if a part of the repeated tokens continues after a layer.

    Those continue whose document tokens that layer's attention reached most, relative to each
    head's mean.
    """

    def of(row: Reading) -> list[Tensor]:
        return _again(row, row.hidden[0], row.places, cut=(layer, part))

    return _by_row(reading, of)


def first_layers(reading: Reading, stop: int, others: str = "fixed") -> Saliency:
    """Return the saliency if the second reading ends before layer ``stop``; ``others`` behind."""
    behind = (fixed if others == "fixed" else shifted)(reading)

    def of(row: Reading) -> list[Tensor]:
        return _again(row, row.hidden[0], row.places, stop=stop)

    return (*_by_row(reading, of), *behind[stop:])


def last_layers(reading: Reading, start: int) -> Saliency:
    """Return the saliency if the second reading begins at layer ``start``; `fixed` below it.

    The hidden states that entered the layer in the first reading enter it again, at positions
    behind the document.
    """

    def of(row: Reading) -> list[Tensor]:
        return _again(row, row.hidden[start], row.places, start=start)

    return (*fixed(reading)[:start], *_by_row(reading, of))


@torch.no_grad()
def oracle(reading: Reading, following: Sequence[Sequence[int]]) -> Saliency:
    """Return the largest attention from the true questions and answers: no rule knows them.

    Args:
        reading: The documents.
        following: The token ids that follow each document.
    """
    found = []
    for index, ids in enumerate(following):
        embedded = reading.model.model.embed_tokens(torch.tensor([ids]))
        found.append(_again(reading.row(index), embedded, torch.arange(len(ids))))
    return tuple(torch.cat(of_layer) for of_layer in zip(*found, strict=True))


def relative(found: Saliency) -> Saliency:
    """Return saliencies divided by the mean of each head."""
    return tuple(each / each.mean(dim=-1, keepdim=True) for each in found)


def _by_row(reading: Reading, of: Any) -> Saliency:
    rows = [of(reading.row(index)) for index in range(len(reading.ids))]
    return tuple(torch.cat(of_layer) for of_layer in zip(*rows, strict=True))


@torch.no_grad()
def _again(
    row: Reading,
    hidden: Tensor,
    places: Tensor,
    *,
    start: int = 0,
    stop: int | None = None,
    cut: tuple[int, float] | None = None,
) -> list[Tensor]:
    """Run layers ``start`` to ``stop`` for tokens behind the document; return each layer's peaks.

    Args:
        row: The reading of one document.
        hidden: What enters the first of the layers, ``[1, tokens, hidden_size]``.
        places: Positions of the tokens, counted from the document's end, ascending.
        start: The first layer.
        stop: The layer before which the reading ends.
        cut: A layer, and the part of the tokens that continues after it.
    """
    found = []
    for index in range(start, len(row.layers) if stop is None else stop):
        own, first = states(row.model, index, hidden), row.layers[index]
        queries, keys = (
            rotated(row.model, each, places + row.length) for each in (own.queries, own.keys)
        )
        keys = torch.cat([rotated(row.model, first.keys, row.places), keys], dim=2)
        peaks, mixed = _attended(queries, keys, torch.cat([first.values, own.values], dim=2))
        found.append(grouped(peaks[..., : row.length], row.kv_heads))
        hidden = _finished(row, index, hidden, mixed)
        if cut is not None and cut[0] == index:
            reached = relative((found[-1],))[0].amax(dim=1)[0, places]
            going = reached.topk(int(len(places) * cut[1])).indices.sort().values
            hidden, places = hidden[:, going], places[going]
    return found


def _attended(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest attention that each key receives, and the outputs of all heads.

    The last ``tokens`` keys are the queries' own; those are seen causally.
    """
    heads, tokens = queries.shape[1:3]
    group, behind = heads // keys.shape[1], keys.shape[2] - tokens
    seen = torch.arange(keys.shape[2]) <= torch.arange(tokens)[:, None] + behind
    peaks, mixed = [], []
    for head in range(heads):
        logits = queries[0, head] @ keys[0, head // group].T / keys.shape[3] ** 0.5
        weights = logits.masked_fill_(~seen, -torch.inf).softmax(dim=-1)
        peaks.append(weights.amax(dim=0))
        mixed.append(weights @ values[0, head // group])
    return torch.stack(peaks)[None], torch.cat(mixed, dim=-1)[None]


def _finished(row: Reading, index: int, hidden: Tensor, mixed: Tensor) -> Tensor:
    """Return what leaves a layer, from what entered it and its heads' outputs."""
    layer: Any = row.model.model.layers[index]
    hidden = hidden + layer.self_attn.o_proj(mixed)
    after: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return after
