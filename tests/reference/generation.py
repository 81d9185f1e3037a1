"""Greedy generation over several turns with a method applied at each turn's prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention import Entry, attention_probabilities
from .decoder import (
    decoder_layers,
    embed,
    finish_layer,
    geometry,
    logits_of,
    project,
)
from .dense import Act
from .methods import LayerView, Method
from .pyramid import PyramidInfer
from .scored_methods import Scored


@dataclass(frozen=True)
class TurnResult:
    """What one turn gave.

    Attributes:
        prefill_logits: `[vocab]`, after the last new token.
        decode_logits: `[num_decode, vocab]`.
        tokens: `num_decode + 1` greedy tokens, the argmax of the prefill logits and of each decode
            step; the last one has not been fed.
        kept: per layer and KV head the positions kept right after the act, ascending.
        propagated: layer to the positions it passed on, for layers that passed on fewer than all.
        reached: per layer the positions of the new tokens that reached it, ascending.
        start: tokens seen before the turn.
        end: tokens seen right after the act.
        margin: smallest relative gap of any choice in the act (`selection.margin`); a choice within
            rounding, say below 1e-4, may rightly fall otherwise in another implementation.
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
    def act(self) -> Act:
        """The act as `dense.visible_after` wants it."""
        return Act(self.start, self.end, self.kept, self.reached)


class ReferenceState:
    """One row's context: what every layer and KV head holds, and how many tokens were seen.

    Attributes:
        cache: per layer, per KV head, the entries held, by ascending position.
        seen: tokens of the row so far: those of prompts and those fed in decoding.
    """

    def __init__(self, model: PreTrainedModel, method: Method | Scored | PyramidInfer) -> None:
        """Starts an empty context.

        Args:
            model: a causal language model of the Llama, Mistral, Qwen2 or Qwen3 family on the CPU.
            method: what to keep and pass on.
        """
        sizes = geometry(model)
        self.model = model
        self.method = method
        self.seen = 0
        self.cache: list[list[list[Entry]]] = [
            [[] for _ in range(sizes.kv_heads)] for _ in range(sizes.num_layers)
        ]

    def positions(self) -> list[list[list[int]]]:
        """Per layer and KV head the positions held now, ascending."""
        return [[[entry.position for entry in held] for held in layer] for layer in self.cache]

    @torch.no_grad()
    def turn(
        self,
        new_token_ids: Sequence[int],
        num_decode: int,
        forced: Sequence[int] | None = None,
    ) -> TurnResult:
        """Prefills new tokens, lets the method act, then decodes greedily.

        Args:
            new_token_ids: at least one; they begin with the last turn's unfed token where the
                caller wants it in the context.
            num_decode: decode steps; each feeds a token, appends it and chooses nothing.
            forced: `num_decode` tokens to feed in the place of the greedy ones, or None.

        Returns:
            Logits, greedy tokens and the choices made.
        """
        assert len(new_token_ids) > 0, "a turn needs a new token"
        assert forced is None or len(forced) == num_decode, "one forced token for each decode step"
        start = self.seen
        prefill_logits, kept, reached, margin = self._act(new_token_ids)
        propagated = {
            layer: later for layer, (now, later) in enumerate(pairwise(reached)) if later != now
        }
        end = self.seen
        tokens = [int(prefill_logits.argmax())]
        decode_logits: list[Tensor] = []
        for step in range(num_decode):
            decode_logits.append(self._decode(tokens[-1] if forced is None else forced[step]))
            tokens.append(int(decode_logits[-1].argmax()))
        stacked = torch.stack([prefill_logits, *decode_logits])[1:]
        return TurnResult(
            prefill_logits,
            stacked,
            tokens,
            kept,
            propagated,
            reached[:-1],
            start,
            end,
            margin,
        )

    def _act(
        self, new_token_ids: Sequence[int]
    ) -> tuple[Tensor, list[list[list[int]]], list[list[int]], float]:
        """Prefill with selection and propagation.

        Returns:
            Logits `[vocab]`; kept positions per layer and KV head; the positions that reached each
            layer and, last, those that left the last one; the smallest margin.
        """
        positions = list(range(self.seen, self.seen + len(new_token_ids)))
        self.seen += len(new_token_ids)
        hidden = embed(self.model, new_token_ids)
        reached = [positions]
        margin = inf
        for layer_idx in range(len(self.cache)):
            hidden, queries, grown = self._layer(layer_idx, hidden, positions)
            scaling = float(decoder_layers(self.model)[layer_idx].self_attn.scaling)
            choice = self.method.choose(
                LayerView(layer_idx, len(self.cache), queries, positions, grown, self.seen, scaling)
            )
            margin = min(margin, choice.margin)
            self.cache[layer_idx] = [
                [held[index] for index in kept]
                for held, kept in zip(grown, choice.kept, strict=True)
            ]
            if choice.passed is not None:
                hidden = hidden[choice.passed]
                positions = [positions[index] for index in choice.passed]
            reached.append(positions)
        return logits_of(self.model, hidden[-1]), self.positions(), reached, margin

    def _decode(self, token_id: int) -> Tensor:
        """Feeds one token through every layer and appends it everywhere; logits `[vocab]`."""
        position = self.seen
        self.seen += 1
        hidden = embed(self.model, [token_id])
        for layer_idx in range(len(self.cache)):
            hidden, _, self.cache[layer_idx] = self._layer(layer_idx, hidden, [position])
        return logits_of(self.model, hidden[-1])

    def _layer(
        self, layer_idx: int, hidden: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, list[Tensor], list[list[Entry]]]:
        """Runs one layer over what it holds and the tokens at hand, `hidden` `[len, hidden]`.

        Returns:
            What leaves the layer `[len, hidden]`; queries per query head `[len, head_dim]`; per KV
            head the entries held before and then the new ones.
        """
        queries, new = project(self.model, layer_idx, hidden, positions)
        grown = [old + added for old, added in zip(self.cache[layer_idx], new, strict=True)]
        scaling = float(decoder_layers(self.model)[layer_idx].self_attn.scaling)
        group = len(queries) // len(grown)
        outputs = []
        for head, head_queries in enumerate(queries):
            held = grown[head // group]
            probabilities = attention_probabilities(head_queries, positions, held, scaling)
            outputs.append(probabilities @ torch.stack([entry.value for entry in held]))
        return finish_layer(self.model, layer_idx, hidden, outputs), queries, grown
