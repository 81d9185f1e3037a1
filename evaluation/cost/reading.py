"""Compute the bytes in use while a prompt is read in one forward and its answer is decoded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from kvpolicy.evaluation.cost.activations import LayerActivations, ModelMemory
from kvpolicy.evaluation.cost.model_shape import LayerShape, ModelShape
from kvpolicy.integrations.transformers.forward.narrowing import LARGEST_SHARE
from kvpolicy.policy import CachePolicy

POSITION_BYTES = 8


def most_of(layer: LayerActivations) -> int:
    """Return the largest number of bytes in use at any moment of a layer's forward pass."""
    return max(layer.attending, layer.observing, layer.after)


@attrs.define
class Reading:
    """The memory it takes to read a prompt in one forward pass under a policy.

    Args:
        policy: The policy, its layers placed.
        shape: The model's sizes.
        model: What its forwards hold.
        context_len: Tokens of the prompt.
        room: Slots that each layer has memory for behind what it keeps.
        kept: For each layer, the tokens that it keeps.
        token_bytes: For each layer, the bytes of a token's keys and values.
        device: Where the model is meant to run.
    """

    policy: CachePolicy
    shape: ModelShape
    model: ModelMemory
    context_len: int
    room: int
    kept: tuple[int, ...]
    token_bytes: Sequence[int]
    device: str

    # The bytes that layers hold.

    def stored(self, index: int) -> int:
        """Return the bytes that a layer stores after the policy has chosen its tokens."""
        size, layer = self.token_bytes[index], self.shape.layers[index]
        if not size:
            return 0
        evicts = self.kept[index] < self.context_len
        heads = 1 if is_latent(layer) else layer.kv_heads
        places = heads * POSITION_BYTES * self.kept[index] * evicts
        return (self.kept[index] + self.room) * size + places

    @property
    def waiting(self) -> list[int]:
        """The layers that store all prompt tokens until tokens are chosen for all layers."""
        return [
            index
            for index, layer in enumerate(self.shape.layers)
            if self.token_bytes[index]
            and self.policy.decides_later
            and (layer.window is None or layer.window >= self.context_len)
        ]

    def when_read(self) -> int:
        """Return the bytes that all layers store right after the prompt was read."""
        return sum(map(self._held_back, range(self.shape.num_layers)))

    def _held_back(self, index: int) -> int:
        if index in self.waiting:
            return self.context_len * self.token_bytes[index]
        return self.stored(index)

    def while_answering(self, answer_len: int) -> tuple[int, int]:
        """Return the bytes stored at an answer's end, and the peak bytes while it is decoded."""
        stored = sum(map(self.stored, range(self.shape.num_layers)))
        rule = self.policy.decoding
        if rule is None or answer_len < rule.every:
            return stored, stored
        seen = self.context_len + answer_len
        rates = rule.selector.kept_rates(self.shape.num_layers, seen)
        bounded = remembered = 0
        for index, layer in enumerate(self.shape.layers):
            most = math.floor(rates[index] * seen + 1e-6)
            if layer.window is not None and layer.window < seen:
                most = layer.window - 1
            slots = most + rule.every
            heads = 1 if is_latent(layer) else layer.kv_heads
            bounded += slots * self.token_bytes[index] + heads * POSITION_BYTES * most
            queries = rule.every if rule.num_queries is None else rule.num_queries
            remembered += queries * self._query_bytes(index)
        # All layers choose before any of them moves its kept tokens.
        return max(stored, bounded) + remembered, stored + bounded + remembered

    def _query_bytes(self, index: int) -> int:
        """Return the bytes of one token's queries in a layer; 0 if the layer stores no keys."""
        layer = self.shape.layers[index]
        looks = self.token_bytes[index] > 0
        return looks * layer.query_heads * layer.key_dim * self.model.dtype.itemsize

    def _deciding(self, index: int, key_len: int, query_len: int | None = None) -> int:
        """Return the bytes a policy needs to choose a layer's tokens, given its query count."""
        place = index, self.shape.num_layers
        layer = self.shape.layers[index]
        if layer.window is not None and layer.window < self.context_len:
            return 0
        return self.model.deciding(
            self.policy, layer, place, key_len, self.device, query_len=query_len
        )

    # In one forward.

    def most(self) -> int:
        """Return the peak bytes in use while the prompt is read in one forward pass."""
        propagation, num_layers = self.policy.propagation, self.shape.num_layers
        passes = list(propagation.prefill_passes(num_layers, self.context_len))
        peak = 0
        for number, rates in enumerate(passes):
            keeps = not propagation.restarts or number == len(passes) - 1
            peak = max(peak, self._pass([rate * self.context_len for rate in rates], keeps=keeps))
        return peak

    def _pass(self, arriving: Sequence[float], *, keeps: bool) -> int:
        """Return the peak bytes of a forward pass, given how many tokens reach each layer."""
        peak = total = 0
        for index, tokens in enumerate(arriving):
            if not tokens and not (index and arriving[index - 1]):
                continue  # a layer that is not run
            here = self._reached(index, round(tokens or arriving[index - 1]))
            stored = self._held_back(index) if keeps else 0
            deciding = self._deciding(index, round(tokens or arriving[index - 1]))
            moments = [here.observing + max(deciding, stored)]
            # Before a restart, the choosing layer ends after its queries; others run completely.
            if tokens and not (keeps and self._narrows(index, arriving)):
                moments += [here.attending, here.after + stored]
            peak = max(peak, total + max(moments))
            total += stored
        return peak

    def _narrows(self, index: int, arriving: Sequence[float]) -> bool:
        """True if a layer computes outputs only for tokens that go on, because these are few."""
        if not self._is_plain(index):
            return False
        last = index == len(arriving) - 1
        return last or arriving[index + 1] <= LARGEST_SHARE * arriving[index]

    def _is_plain(self, index: int) -> bool:
        """True if a layer can compute outputs for only some tokens: attention without a state."""
        layer = self.shape.layers[index]
        return layer.chooses and not layer.state_elements

    def _reached(self, index: int, tokens: int) -> LayerActivations:
        """Return a layer's bytes in use when only ``tokens`` of the prompt's tokens reach it."""
        loops = bool(self._states)
        if tokens >= self.context_len:
            return self.model.forward(self.context_len, loops=loops).layers[index]
        # The embeddings of all tokens are held by the decoder.
        dropped = self.context_len - tokens
        base = dropped * self.shape.hidden_size * self.model.dtype.itemsize
        # Lengths differ by layer if some tokens are dropped after each layer.
        whole = self.model.forward(self.context_len, loops=loops)
        half = self.model.forward(max(self.context_len // 2, 1), loops=loops)
        share = tokens / self.context_len
        pairs = zip(
            attrs.astuple(half.layers[index]), attrs.astuple(whole.layers[index]), strict=True
        )
        found = (max(round(low + (high - low) * (2 * share - 1)), 0) + base for low, high in pairs)
        return LayerActivations(*found)

    @property
    def _states(self) -> list[int]:
        return [i for i, layer in enumerate(self.shape.layers) if layer.state_elements]


def is_latent(layer: LayerShape) -> bool:
    """True if a layer stores one latent vector per token for all heads, as in MLA."""
    return layer.token_elements < layer.kv_heads * (layer.key_dim + layer.value_dim)
