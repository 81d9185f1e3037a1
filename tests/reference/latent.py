"""Computes latent attention: one latent and one rotary key per token, for all heads.

The layer's output is computed from the keys and values that each latent expands to, head by head.
A method is shown an equivalent, shorter form: the product of a query with an expanded key equals
the product of the query, multiplied by the transposed expansion, with the latent itself. So a
layer is one KV head whose group is all query heads, and every method makes one choice for it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from .anomaly import NestedKV
from .attention import Entry, attention_probabilities
from .decoder import decoder_layers, finish_layer, rms_norm, rotate
from .droppers import CLAA
from .generation import Heads, Held, LayerOutput, ReferenceState
from .methods import LayerView, Method
from .query_agnostic import ExpectedAttention
from .replayed import Replay
from .runs import LagKV
from .scored_methods import RKV, KeyDiff, two_minus_cosines
from .selection import head_mean


@dataclass(frozen=True)
class LatentEntry(Entry):
    """An entry with latent and rotary key in `key`, and the latent in `value`.

    Attributes:
        heads: per query head the key and the value that the latent expands to.
    """

    heads: tuple[Entry, ...]


@dataclass(frozen=True)
class LatentKeyDiff(KeyDiff):
    """KeyDiff on the expanded keys, averaged over all heads.

    A latent and its expanded key have the same product with a query, but another direction.
    """

    def scores(self, layer: LayerView, head: int) -> list[float]:
        return head_mean([two_minus_cosines(held) for held in per_head(layer.entries[head])])


@dataclass(frozen=True)
class LatentRKV(RKV):
    """RKV on the expanded keys, with each head as its own group."""

    def scores(self, layer: LayerView, head: int) -> list[float]:
        found = []
        for queries, held in zip(layer.queries, per_head(layer.entries[head]), strict=True):
            importances = self.importances(replace(layer, queries=[queries]), head)
            found.append(self.weighed(importances, self.redundancy(held)))
        return head_mean(found)


@dataclass(frozen=True)
class LatentLagKV(LagKV):
    """LagKV on the expanded keys and values, averaged over all heads."""

    def scores(self, layer: LayerView, head: int) -> list[float]:
        return head_mean([self.of_entries(held) for held in per_head(layer.entries[head])])


@dataclass(frozen=True)
class LatentNestedKV(NestedKV):
    """NestedKV on the expanded keys, averaged over all heads."""

    def of_entries(self, held: Sequence[Entry]) -> list[float]:
        return head_mean([super(LatentNestedKV, self).of_entries(own) for own in per_head(held)])


@dataclass(frozen=True)
class LatentExpectedAttention(ExpectedAttention):
    """ExpectedAttention with the norms of expanded values, averaged over all heads."""

    def scores(self, layer: LayerView, head: int) -> list[float]:
        found = []
        for queries, held in zip(layer.queries, per_head(layer.entries[head]), strict=True):
            pairs = zip(layer.entries[head], held, strict=True)
            entries = [replace(one, value=expanded.value) for one, expanded in pairs]
            found.append(super().scores(replace(layer, queries=[queries], entries=[entries]), 0))
        return head_mean(found)


@dataclass(frozen=True)
class LatentCLAA(CLAA):
    """CLAA in which every query head votes, since each has keys of its own."""

    def of_kv_heads(self, rows: list[list[float]], layer: LayerView) -> list[list[float]]:
        return rows


@dataclass(frozen=True)
class LatentReplay(Replay):
    """Replay with the norms of expanded values, head by head."""

    def saliency(self, layer: LayerView) -> list[list[float]]:
        (held,) = layer.entries
        return [
            self.of_group(layer, [queries], held, [each.value for each in expanded])
            for queries, expanded in zip(layer.queries, per_head(held), strict=True)
        ]


@dataclass(frozen=True)
class LatentDroppingReplay(LatentReplay, LatentCLAA):
    """A `LatentReplay` that passes on, after one layer, what stands out in any head so far."""

    voting_layers: int = 1000
    whole_layers: int = 0
    spans: int = 7


def per_head(held: Sequence[Entry]) -> list[tuple[Entry, ...]]:
    """Returns the entries of each head, expanded from a layer's latents."""
    expanded = [entry.heads for entry in held if isinstance(entry, LatentEntry)]
    return list(zip(*expanded, strict=True))


def of_latents(method: Any) -> Any:
    """Returns a method's variant for layers whose heads share latents, or the method itself."""
    kinds: list[tuple[type, type]] = [
        *((KeyDiff, LatentKeyDiff), (RKV, LatentRKV), (LagKV, LatentLagKV)),
        *((NestedKV, LatentNestedKV), (ExpectedAttention, LatentExpectedAttention)),
        (Replay, LatentDroppingReplay if isinstance(method, CLAA) else LatentReplay),
        (CLAA, LatentCLAA),
    ]
    found = (latent for kind, latent in kinds if isinstance(method, kind))
    kind = next(found, None)
    return method if kind is None else kind(**asdict(method))


class LatentState(ReferenceState):
    """The context of one row in a model of the DeepSeek V3 family."""

    def __init__(self, model: PreTrainedModel, method: Method) -> None:
        super().__init__(model, of_latents(method))

    def _heads_held(self) -> list[int]:
        return [1] * len(decoder_layers(self.model))

    def _view(
        self, layer_idx: int, queries: Heads, positions: Sequence[int], entries: Held
    ) -> LayerView:
        view = super()._view(layer_idx, queries, positions, entries)
        config: Any = self.model.config
        return replace(view, rope_channels=slice(config.kv_lora_rank, None))

    def _layer(
        self, layer_idx: int, hidden: Tensor, positions: Sequence[int], rotary: Sequence[int]
    ) -> LayerOutput:
        layer = decoder_layers(self.model)[layer_idx]
        attention = layer.self_attn
        normed = rms_norm(hidden, layer.input_layernorm)
        queries = expanded_queries(attention, normed, rotary)
        grown = [*self.cache[layer_idx][0], *self._entries(attention, normed, positions, rotary)]
        outputs = self._attend(attention, normed, queries, positions, rotary, grown)
        left = finish_layer(self.model, layer_idx, hidden, outputs)
        absorbed = [
            absorb(attention, head, head_queries) for head, head_queries in enumerate(queries)
        ]
        return left, absorbed, [grown]

    def _entries(
        self, attention: Any, normed: Tensor, positions: Sequence[int], rotary: Sequence[int]
    ) -> list[Entry]:
        return latent_entries(attention, normed, positions, rotary)

    def _attend(
        self,
        attention: Any,
        normed: Tensor,
        queries: Sequence[Tensor],
        positions: Sequence[int],
        rotary: Sequence[int],
        grown: Sequence[Entry],
    ) -> list[Tensor]:
        scaling, outputs = float(attention.scaling), []
        for head_queries, held in zip(queries, per_head(grown), strict=True):
            given = attention_probabilities(head_queries, positions, held, scaling)
            outputs.append(given @ torch.stack([entry.value for entry in held]))
        return outputs


def turn(attention: Any, vector: Tensor, position: int) -> Tensor:
    """Applies rotary embedding to a vector `[rope]`; interleaved pairs are reordered first."""
    rope: dict[str, Any] = attention.config.rope_parameters
    assert rope["rope_type"] == "default", "only the default rotary embedding is covered"
    if getattr(attention.config, "rope_interleave", True):
        vector = torch.cat([vector[0::2], vector[1::2]])
    return rotate(vector, position, float(rope["rope_theta"]))


def expanded_queries(attention: Any, normed: Tensor, rotary: Sequence[int]) -> list[Tensor]:
    """Returns, per query head, the queries `[len, nope + rope]` with the last `rope` rotated."""
    if attention.q_lora_rank is None:
        flat = linear(normed, attention.q_proj.weight)
    else:
        squeezed = linear(normed, attention.q_a_proj.weight, attention.q_a_proj.bias)
        flat = linear(rms_norm(squeezed, attention.q_a_layernorm), attention.q_b_proj.weight)
    nope = attention.qk_nope_head_dim
    queries = []
    for head in flat.split(attention.qk_head_dim, dim=1):
        rows = [
            torch.cat([row[:nope], turn(attention, row[nope:], at)])
            for row, at in zip(head, rotary, strict=True)
        ]
        queries.append(torch.stack(rows))
    return queries


def expansions(attention: Any) -> list[tuple[Tensor, Tensor]]:
    """Returns each query head's maps from latents to keys `[nope, rank]` and values `[v, rank]`."""
    sizes = [attention.qk_nope_head_dim, attention.v_head_dim]
    return [
        (block[: sizes[0]], block[sizes[0] :])
        for block in attention.kv_b_proj.weight.split(sum(sizes), dim=0)
    ]


def latent_entries(
    attention: Any, normed: Tensor, positions: Sequence[int], rotary: Sequence[int]
) -> list[Entry]:
    """Returns the entries that the layer stores for the new tokens."""
    projection = attention.kv_a_proj_with_mqa
    rank = attention.kv_lora_rank
    matrices = expansions(attention)
    entries: list[Entry] = []
    for row, position, at in zip(
        linear(normed, projection.weight, projection.bias), positions, rotary, strict=True
    ):
        latent = rms_norm(row[:rank], attention.kv_a_layernorm)
        turned = turn(attention, row[rank:], at)
        heads = tuple(
            Entry(position, torch.cat([to_key @ latent, turned]), to_value @ latent)
            for to_key, to_value in matrices
        )
        entries.append(LatentEntry(position, torch.cat([latent, turned]), latent, heads))
    return entries


def absorb(attention: Any, head: int, queries: Tensor) -> Tensor:
    """Maps a head's queries `[len, nope + rope]` to the latents' space, `[len, rank + rope]`."""
    nope = attention.qk_nope_head_dim
    to_key, _ = expansions(attention)[head]
    return torch.cat([queries[:, :nope] @ to_key, queries[:, nope:]], dim=1)
