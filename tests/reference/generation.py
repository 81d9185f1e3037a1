"""Generates greedily over several turns, and applies a method at each turn's prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention import Entry, attention_probabilities
from .decoder import decoder_layers, embed, finish_layer, geometry, logits_of, project
from .dense import Act
from .gem_filter import GemFilter
from .methods import Choice, LayerView, Method

# Per query head the queries `[len, head_dim]`; per KV head the entries.
Heads = Sequence[Tensor]
Held = Sequence[Sequence[Entry]]
# What leaves a layer `[len, hidden]`, its queries, and all entries that it holds then.
LayerOutput = tuple[Tensor, list[Tensor], list[list[Entry]]]


@dataclass(frozen=True)
class TurnResult:
    """The results of one turn; positions count all tokens of the row, also after a restart.

    Attributes:
        prefill_logits: `[vocab]`, after the last new token.
        decode_logits: `[num_decode, vocab]`.
        tokens: `num_decode + 1` greedy tokens, the argmax of the prefill logits and of each decode
            step; the last token has not been fed to the model.
        kept: per layer and KV head the positions kept right after the act, ascending.
        propagated: layer to the positions it passed on, for layers that passed on fewer than all;
            for a restart, the filter layer to the positions that the second pass ran on.
        reached: per layer the positions of the new tokens that reached it, ascending; for a
            restart, in the second pass.
        start: tokens seen before the turn.
        end: tokens seen right after the act.
        margin: smallest relative gap of any choice in the act (`selection.margin`). If it is within
            rounding, say below 1e-4, another correct implementation may choose differently.
    """

    prefill_logits: Tensor
    decode_logits: Tensor
    tokens: list[int]
    kept: list[list[list[int]]]
    propagated: dict[int, list[int]]
    reached: list[list[int]]
    start: int
    end: int
    margin: float

    @property
    def logits(self) -> Tensor:
        """Returns the logits `[1 + num_decode, vocab]` after the act and after each token."""
        return torch.cat([self.prefill_logits[None], self.decode_logits])

    @property
    def act(self) -> Act:
        """Returns the turn's prefill and choices, as `dense.visible_after` takes them.

        A mask has no rotary positions. After a restart, compare with a dense forward over a row of
        only the chosen tokens.
        """
        return Act(self.start, self.end, self.kept, self.reached)


class ReferenceState:
    """The context of one row: the entries of every layer and KV head, and the tokens seen.

    Attributes:
        cache: per layer, per KV head, the entries held, by ascending position.
        seen: tokens of the row so far: those of prompts and those fed in decoding.
        rotary: number of rotary positions in use, which is the next token's rotary position; it is
            less than `seen` after a restart on fewer than all tokens.
        notes: see `LayerView.notes`.
    """

    def __init__(self, model: PreTrainedModel, method: Method) -> None:
        self.model = model
        self.method = method
        self.seen = 0
        self.rotary = 0
        self.notes: dict[int, Any] = {}
        self.cache: list[list[list[Entry]]] = [
            [[] for _ in range(heads)] for heads in self._heads_held()
        ]

    def _heads_held(self) -> list[int]:
        """Returns, for each layer, the number of KV heads that store entries of their own."""
        sizes = geometry(self.model)
        return [sizes.kv_heads] * sizes.num_layers

    def positions(self) -> list[list[list[int]]]:
        """Returns the positions that each layer and KV head holds now, ascending."""
        return [[[entry.position for entry in held] for held in layer] for layer in self.cache]

    @torch.no_grad()
    def turn(
        self, new_token_ids: Sequence[int], num_decode: int, forced: Sequence[int] | None = None
    ) -> TurnResult:
        """Prefills new tokens, applies the method, then decodes greedily."""
        assert len(new_token_ids) > 0, "a turn needs a new token"
        assert forced is None or len(forced) == num_decode, "one forced token for each decode step"
        start = self.seen
        prefill_logits, propagated, reached, margin = self._act(new_token_ids)
        kept = self.positions()
        end = self.seen
        tokens = [int(prefill_logits.argmax())]
        decode_logits: list[Tensor] = []
        for step in range(num_decode):
            decode_logits.append(self._decode(tokens[-1] if forced is None else forced[step]))
            tokens.append(int(decode_logits[-1].argmax()))
        stacked = torch.stack([prefill_logits, *decode_logits])[1:]
        return TurnResult(
            prefill_logits, stacked, tokens, kept, propagated, reached, start, end, margin
        )

    def _act(
        self, new_token_ids: Sequence[int]
    ) -> tuple[Tensor, dict[int, list[int]], list[list[int]], float]:
        """Prefills new tokens and applies the method's choices.

        Returns logits; by layer what went on, if not all; what reached each; the smallest margin.
        """
        positions = list(range(self.seen, self.seen + len(new_token_ids)))
        self.seen += len(new_token_ids)
        if isinstance(self.method, GemFilter):
            layer_idx = self.method.acting_layer(len(self.cache))
            view = self._first_pass(new_token_ids, positions, layer_idx)
            chosen, margin = self.method.restart_on(view)
            passed = [positions[index] for index in chosen]
            logits, reached, _ = self._prefill([new_token_ids[index] for index in chosen], passed)
            dropped = {layer_idx: passed} if len(passed) < len(positions) else {}
            return logits, dropped, reached[:-1], margin
        logits, reached, margin = self._prefill(new_token_ids, positions)
        dropped = {
            layer: later for layer, (now, later) in enumerate(pairwise(reached)) if later != now
        }
        return logits, dropped, reached[:-1], margin

    def _first_pass(
        self, token_ids: Sequence[int], positions: Sequence[int], last_layer: int
    ) -> LayerView:
        """Runs new tokens up to `last_layer`, stores nothing, and returns that layer's view."""
        rotary = range(self.rotary, self.rotary + len(token_ids))
        hidden = embed(self.model, token_ids)
        for layer_idx in range(last_layer + 1):
            hidden, queries, grown = self._layer(layer_idx, hidden, positions, rotary)
        return self._view(last_layer, queries, positions, grown)

    def _prefill(
        self, token_ids: Sequence[int], positions: Sequence[int]
    ) -> tuple[Tensor, list[list[int]], float]:
        """Runs tokens through all layers, and applies the method's choice at each.

        Returns logits; what reached each layer and, last, what left the last; the smallest margin.
        """
        self.notes = {}  # a method remembers nothing of other prompts
        positions = list(positions)
        rotary = list(range(self.rotary, self.rotary + len(token_ids)))
        self.rotary += len(token_ids)
        hidden = embed(self.model, token_ids)
        reached = [positions]
        margin = inf
        for layer_idx in range(len(self.cache)):
            hidden, queries, grown = self._layer(layer_idx, hidden, positions, rotary)
            choice = self._choose(layer_idx, queries, positions, grown)
            margin = min(margin, choice.margin)
            self.cache[layer_idx] = [
                [held[index] for index in kept]
                for held, kept in zip(grown, choice.kept, strict=True)
            ]
            if choice.passed is not None:
                hidden = hidden[choice.passed]
                positions = [positions[index] for index in choice.passed]
                rotary = [rotary[index] for index in choice.passed]
            reached.append(positions)
        return self._logits(hidden[-1]), reached, margin

    def _choose(
        self, layer_idx: int, queries: Heads, positions: Sequence[int], entries: Held
    ) -> Choice:
        """Returns the method's choice at a layer after its attention."""
        return self.method.choose(self._view(layer_idx, queries, positions, entries))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Maps the last layer's output `[hidden]` to logits `[vocab]`."""
        return logits_of(self.model, hidden)

    def _view(
        self, layer_idx: int, queries: Heads, positions: Sequence[int], entries: Held
    ) -> LayerView:
        attention = decoder_layers(self.model)[layer_idx].self_attn
        return LayerView(
            layer_idx,
            len(self.cache),
            queries,
            positions,
            entries,
            self.seen,
            float(attention.scaling),
            (getattr(self.model.config, "rope_parameters", None) or {}).get("rope_theta"),
            attention.o_proj.weight if hasattr(attention, "o_proj") else None,
            notes=self.notes,
        )

    def _decode(self, token_id: int) -> Tensor:
        """Feeds one token, appends it in every layer and returns its logits `[vocab]`."""
        position, rotary = self.seen, self.rotary
        self.seen += 1
        self.rotary += 1
        hidden = embed(self.model, [token_id])
        for layer_idx in range(len(self.cache)):
            hidden, _, self.cache[layer_idx] = self._layer(layer_idx, hidden, [position], [rotary])
        return self._logits(hidden[-1])

    def _layer(
        self, layer_idx: int, hidden: Tensor, positions: Sequence[int], rotary: Sequence[int]
    ) -> LayerOutput:
        """Runs one layer on new tokens, over the entries it holds.

        Returns its output `[len, hidden]`, queries per query head, and all entries per KV head.
        """
        queries, new = project(self.model, layer_idx, hidden, positions, rotary)
        grown = [old + added for old, added in zip(self.cache[layer_idx], new, strict=True)]
        return self._attended(layer_idx, hidden, queries, positions, grown), queries, grown

    def _attended(
        self, layer_idx: int, hidden: Tensor, queries: Heads, positions: Sequence[int], grown: Held
    ) -> Tensor:
        """Returns a layer's output, of queries that attend to entries."""
        scaling = float(decoder_layers(self.model)[layer_idx].self_attn.scaling)
        group = len(queries) // len(grown)
        outputs = []
        for head, head_queries in enumerate(queries):
            held = grown[head // group]
            probabilities = attention_probabilities(head_queries, positions, held, scaling)
            outputs.append(probabilities @ torch.stack([entry.value for entry in held]))
        return finish_layer(self.model, layer_idx, hidden, outputs)
