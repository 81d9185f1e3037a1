"""Computes latent attention to the tokens that an indexer picks, as in DeepSeek V3.2.

A layer stores a latent and an index key of each token. A query scores the index keys of the held
tokens up to its own position, and attends to the few best of them; evicted tokens are not scored.
Methods are shown all held tokens, as in layers without an indexer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .attention import Entry, attention_probabilities
from .decoder import rms_norm, rotate
from .latent import LatentEntry, LatentState, latent_entries


@dataclass(frozen=True)
class IndexedEntry(LatentEntry):
    """A latent entry that also stores the token's index key.

    Attributes:
        index: the token's index key.
    """

    index: Tensor


class IndexedState(LatentState):
    """The context of one row in a model of the DeepSeek V3.2 family.

    Attributes:
        nearest: how near any query was to picking another token: the smallest gap between the score
            of a picked token and that of another one, relative to the size of the terms that are
            summed to a score; 0 if two scores were equal.
    """

    nearest: float = math.inf

    def _entries(
        self, attention: Any, normed: Tensor, positions: Sequence[int], rotary: Sequence[int]
    ) -> list[Entry]:
        indexer = attention.indexer
        entries: list[Entry] = []
        keys = layer_norm(linear(normed, indexer.wk.weight), indexer.k_norm)
        latents = latent_entries(attention, normed, positions, rotary)
        for entry, key, at in zip(latents, keys, rotary, strict=True):
            assert isinstance(entry, LatentEntry)
            index = turn_first(attention, key, at)
            entries.append(IndexedEntry(entry.position, entry.key, entry.value, entry.heads, index))
        return entries

    def _attend(
        self,
        attention: Any,
        normed: Tensor,
        queries: Sequence[Tensor],
        positions: Sequence[int],
        rotary: Sequence[int],
        grown: Sequence[Entry],
    ) -> list[Tensor]:
        held = [entry for entry in grown if isinstance(entry, IndexedEntry)]
        picked = self._picked(attention, normed, positions, rotary, held)
        outputs = []
        for head, head_queries in enumerate(queries):
            rows = []
            for query, position, slots in zip(head_queries, positions, picked, strict=True):
                seen = [held[slot].heads[head] for slot in slots]
                given = attention_probabilities(
                    query[None], [position], seen, float(attention.scaling)
                )
                rows.append(given[0] @ torch.stack([entry.value for entry in seen]))
            outputs.append(torch.stack(rows))
        return outputs

    def _picked(
        self,
        attention: Any,
        normed: Tensor,
        positions: Sequence[int],
        rotary: Sequence[int],
        held: Sequence[IndexedEntry],
    ) -> list[list[int]]:
        """Returns, for each query, the ascending indices of the entries it attends to."""
        indexer, picked = attention.indexer, []
        squeezed = linear(normed, attention.q_a_proj.weight, attention.q_a_proj.bias)
        queries = linear(rms_norm(squeezed, attention.q_a_layernorm), indexer.wq_b.weight)
        weights = linear(normed, indexer.weights_proj.weight)
        for row, position in enumerate(positions):
            heads = [
                turn_first(attention, query, rotary[row])
                for query in queries[row].split(indexer.head_dim)
            ]
            there = [slot for slot, entry in enumerate(held) if entry.position <= position]
            keys = torch.stack([held[slot].index for slot in there])
            shares = torch.stack([keys @ query for query in heads]).clamp(min=0)
            terms = weights[row][:, None] * shares
            scores = terms.sum(dim=0).tolist()
            best = sorted(range(len(there)), key=lambda place: -scores[place])
            count = min(indexer.index_topk, len(there))
            if count < len(there):
                gap = scores[best[count - 1]] - scores[best[count]]
                self.nearest = min(self.nearest, gap / float(terms.abs().sum(dim=0).max()))
            picked.append(sorted(there[place] for place in best[:count]))
        return picked


def layer_norm(rows: Tensor, norm: Any) -> Tensor:
    """Computes `weight * (x - mean) / sqrt(variance + eps) + bias` over the last axis of `rows`."""
    centred = rows - rows.mean(dim=-1, keepdim=True)
    spread = torch.sqrt((centred * centred).mean(dim=-1, keepdim=True) + norm.eps)
    normed: Tensor = norm.weight * (centred / spread) + norm.bias
    return normed


def turn_first(attention: Any, vector: Tensor, position: int) -> Tensor:
    """Rotates the first channels of an index query or key, paired by halves."""
    rope: dict[str, Any] = attention.config.rope_parameters
    assert rope["rope_type"] == "default", "only the default rotary embedding is covered"
    width = attention.qk_rope_head_dim
    turned = rotate(vector[:width], position, float(rope["rope_theta"]))
    return torch.cat([turned, vector[width:]])
