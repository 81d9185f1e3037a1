"""Saliencies that need one reading of the document alone.

Every function returns ``[batch, kv_heads, length]`` for each layer, larger for tokens to keep. The
main rule is `fixed`: queries of the whole document, turned to the position behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.front.readings.given import SINKS
from benchmarks.front.readings.reading import Reading, grouped, received, rotated

Saliency = tuple[Tensor, ...]


def causal(numbers: Tensor, length: int) -> Tensor:
    """Mark what the queries with these numbers see in a causal reading."""
    return torch.arange(length) <= numbers[:, None]


def own_peaks(reading: Reading) -> Saliency:
    """Return the largest attention that each token received while the document was read."""
    return _own(reading, masked=True)


def own_sums(reading: Reading) -> Saliency:
    """Return the sum of attention that each token received while it was read, as H2O counts."""
    found = []
    for layer in reading.layers:
        queries = rotated(reading.model, layer.queries, reading.places)
        keys = rotated(reading.model, layer.keys, reading.places)
        sums = received(queries, keys, causal, total=True)
        found.append(grouped(sums, reading.kv_heads, "mean"))
    return tuple(found)


def own_unmasked(reading: Reading) -> Saliency:
    """Return the largest attention of all queries, at their own positions, to any token."""
    return _own(reading, masked=False)


def _own(reading: Reading, *, masked: bool) -> Saliency:
    found = []
    for layer in reading.layers:
        queries = rotated(reading.model, layer.queries, reading.places)
        keys = rotated(reading.model, layer.keys, reading.places)
        found.append(grouped(received(queries, keys, causal if masked else None), reading.kv_heads))
    return tuple(found)


def shifted(reading: Reading) -> Saliency:
    """Return the largest attention of query ``i`` at position ``length + i``, without a mask."""
    found = []
    for layer in reading.layers:
        queries = rotated(reading.model, layer.queries, reading.places + reading.length)
        keys = rotated(reading.model, layer.keys, reading.places)
        found.append(grouped(received(queries, keys), reading.kv_heads))
    return tuple(found)


def fixed(reading: Reading, *, every: int = 1, group: str = "max", total: bool = False) -> Saliency:
    """Return the largest attention of all queries, turned to the position behind the document.

    Args:
        reading: The documents.
        every: Distance of the queries that are used: all, or every second, fourth...
        group: How the query heads of a KV head join: ``max``, ``mean`` or ``min``.
        total: Whether attention is summed over the queries, in place of the largest.
    """
    found = []
    for layer in reading.layers:
        queries, keys = _turned(reading, layer.queries[:, :, every - 1 :: every], layer.keys)
        found.append(grouped(received(queries, keys, total=total), reading.kv_heads, group))
    return tuple(found)


def fixed_in_chunks(reading: Reading, size: int = 256) -> Saliency:
    """Return what `fixed` gives if every chunk's queries see its own keys and the sinks alone."""
    found = []
    for layer in reading.layers:
        queries, keys = _turned(reading, layer.queries, layer.keys)
        of_layer = torch.zeros(keys.shape[:3])
        for start in range(0, reading.length, size):
            stop, sinks = min(start + size, reading.length), min(SINKS, start)
            shown = torch.cat([keys[:, :, :sinks], keys[:, :, start:stop]], dim=2)
            peaks = received(queries[:, :, start:stop], shown)
            of_layer[:, :, start:stop] = grouped(peaks, reading.kv_heads)[..., sinks:]
        found.append(of_layer)
    return tuple(found)


def _turned(reading: Reading, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    behind = torch.full((queries.shape[2],), reading.length)
    return rotated(reading.model, queries, behind), rotated(reading.model, keys, reading.places)


def copied_down(reading: Reading, source: int) -> Saliency:
    """Return `fixed`, with the layers below one replaced by that one."""
    found = fixed(reading)
    return (found[source],) * source + found[source:]


def surprise(reading: Reading) -> Saliency:
    """Return how unexpected each token was, ``-log p``, the same in all layers and heads."""
    chances = reading.logits[:, :-1].log_softmax(dim=-1)
    told = -chances.gather(2, reading.ids[:, 1:, None])[..., 0]
    one = functional.pad(told, (1, 0))[:, None].expand(-1, reading.kv_heads, -1)
    return (one,) * len(reading.layers)


@torch.no_grad()
def value_norms(reading: Reading) -> Saliency:
    """Return the norms of the values."""
    return tuple(layer.values.norm(dim=-1) for layer in reading.layers)


@torch.no_grad()
def output_norms(reading: Reading) -> Saliency:
    """Return the norms of the values behind the output projection, the largest of each group."""
    found = []
    for index, layer in enumerate(reading.layers):
        attention: Any = reading.model.model.layers[index].self_attn
        weights = attention.o_proj.weight.T.unflatten(0, (reading.kv_heads, -1, attention.head_dim))
        added = torch.einsum("bgtd,ghdo->bghto", layer.values, weights)
        found.append(added.norm(dim=-1).amax(dim=2))
    return tuple(found)


def key_difference(reading: Reading) -> Saliency:
    """Return minus the cosine of each key to the mean direction of its head's, as KeyDiff does."""
    found = []
    for layer in reading.layers:
        keys = functional.normalize(rotated(reading.model, layer.keys, reading.places), dim=-1)
        mean = functional.normalize(keys.mean(dim=2, keepdim=True), dim=-1)
        found.append(-(keys * mean).sum(dim=-1))
    return tuple(found)


def leverage(reading: Reading, local: int = 16) -> Saliency:
    """Return shares of squared key and value norms among ``local`` neighbours, as CurDKV does."""
    found = []
    for layer in reading.layers:
        product = torch.ones(())
        for each in (layer.keys, layer.values):
            norms = each.square().sum(dim=-1)
            padded = functional.pad(norms, (0, -norms.shape[-1] % local))
            stretches = padded.unflatten(-1, (-1, local))
            shares = stretches / stretches.sum(dim=-1, keepdim=True)
            product = product * shares.flatten(-2)[..., : norms.shape[-1]]
        found.append(product)
    return tuple(found)
