"""What a session under a policy holds: while its prompt is read, and while its answer is decoded.

This follows how `PolicyCache` reads. In one forward, a layer's keys and values are freed when the
policy has chosen among them; in chunks, all layers hold the whole prompt until its end has come.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs

from kvpolicy.checks import check_count, check_kind
from kvpolicy.evaluation.cost.activations import Activations, LayerActivations, ModelMemory
from kvpolicy.evaluation.cost.estimate import estimate
from kvpolicy.evaluation.cost.model_shape import LayerShape, ModelShape
from kvpolicy.integrations.transformers.forward.narrowing import LARGEST_SHARE
from kvpolicy.integrations.transformers.state.storage import GROWTH_SHARE, SMALLEST_GROWTH
from kvpolicy.policy import CachePolicy

POSITION_BYTES = 8
# For each token of the context, whatever layers hold of it: its id, position and whether it is
# padding; `generate` has as much of its own while it works.
TOKEN_BYTES = 3 * 8


@attrs.frozen
class Session:
    """Bytes of one session, the model's weights not counted.

    Args:
        kept: Keys, values and states once the prompt has been read, as `PolicyCache.report` says.
        held: All that is held when the answer ends, or before, if it was more.
        reading: The most while the prompt is read.
        answering: The most while the answer is decoded.
    """

    kept: int
    held: int
    reading: int
    answering: int

    @property
    def peak(self) -> int:
        """The most bytes at any time."""
        return max(self.reading, self.answering)

    @property
    def peak_when(self) -> str:
        """``"reading"`` or ``"answering"``."""
        return "reading" if self.reading >= self.answering else "answering"

    def count_in(self, memory: int, weights: int) -> int:
        """How many such sessions fit, if one at a time works while the others hold what they hold.

        Args:
            memory: Bytes there are.
            weights: Bytes of the model.

        Example:
            >>> Session(kept=10, held=20, reading=50, answering=25).count_in(200, weights=100)
            3
        """
        left = memory - weights - self.peak
        return 0 if left < 0 else 1 + left // max(self.held, 1)


def session_of(
    policy: CachePolicy,
    shape: ModelShape,
    model: ModelMemory,
    context_len: int,
    answer_len: int,
    *,
    chunk: int | None = None,
    device: str = "cuda",
) -> Session | None:
    """What one session holds; nothing is run with numbers but choices on short contexts.

    The cache has memory for the answer in advance, as with ``max_new_tokens``; without it buffers
    grow, and are held twice while they do.

    Args:
        policy: The policy.
        shape: The model's sizes.
        model: The same model, to ask what its forwards hold.
        context_len: Tokens of the prompt, at least 1.
        answer_len: Tokens of the answer, at least 1.
        chunk: Tokens of a forward of the prompt, as ``prefill_chunk_size``; None for all at once.
        device: ``"cuda"`` or ``"cpu"``, which differ in the blocks that policies score in.

    Returns:
        None where a prompt cannot be read in chunks, since the policy drops tokens.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: A number is below 1.
        UnsupportedModelError: The model cannot be run without numbers.
    """
    check_kind("model", model, ModelMemory)
    check_count("answer_len", answer_len, minimum=1)
    if chunk is not None:
        check_count("chunk", chunk, minimum=1)
    found = estimate(policy, shape, context_len, dtype=model.dtype)
    policy = policy.placed(shape.num_layers, shape.eligible)
    every = None if policy.decoding is None else policy.decoding.every
    kept = tuple(math.floor(tokens + 1e-6) for tokens in found.kept_tokens)
    held = zip(kept, found.token_bytes, strict=True)
    reading = _Reading(
        policy,
        shape,
        model,
        context_len,
        answer_len if every is None else min(answer_len, every),
        kept,
        found.token_bytes,
        device,
    )
    if chunk is None or chunk >= context_len:
        peak = reading.whole()
    elif policy.propagation.acting_layers(shape.num_layers):
        return None
    else:
        peak = reading.in_chunks(chunk)
    tokens = (context_len + answer_len) * TOKEN_BYTES
    end, most = reading.while_answering(answer_len)
    step = model.forward(1, max(kept) + 1)
    working = max(step.head, *map(_most, step.layers))
    return Session(
        kept=sum(tokens * size for tokens, size in held) + found.state_bytes,
        held=end + found.state_bytes + tokens,
        reading=peak + 2 * tokens,
        answering=most + found.state_bytes + working + 2 * tokens,
    )


def _most(layer: LayerActivations) -> int:
    return max(layer.attending, layer.observing, layer.after)


@attrs.define
class _Reading:
    """How a prompt is read.

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

    # What layers hold.

    def _stored(self, index: int) -> int:
        """Bytes of a layer that the policy has chosen in."""
        size, layer = self.token_bytes[index], self.shape.layers[index]
        if not size:
            return 0
        evicts = self.kept[index] < self.context_len
        heads = 1 if _is_latent(layer) else layer.kv_heads
        places = heads * POSITION_BYTES * self.kept[index] * evicts
        return (self.kept[index] + self.room) * size + places

    def while_answering(self, answer_len: int) -> tuple[int, int]:
        """Bytes that all layers hold while an answer is decoded, and the most; without states."""
        stored = sum(map(self._stored, range(self.shape.num_layers)))
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
            heads = 1 if _is_latent(layer) else layer.kv_heads
            bounded += slots * self.token_bytes[index] + heads * POSITION_BYTES * most
            queries = rule.every if rule.num_queries is None else rule.num_queries
            remembered += queries * self._query_bytes(index)
        # All layers have chosen before any of them moves what it keeps.
        return max(stored, bounded) + remembered, stored + bounded + remembered

    def _query_bytes(self, index: int) -> int:
        """Bytes of one token's queries, where they are looked at."""
        layer = self.shape.layers[index]
        looks = self.token_bytes[index] > 0
        return looks * layer.query_heads * layer.key_dim * self.model.dtype.itemsize

    def _deciding(self, index: int, key_len: int) -> int:
        place = index, self.shape.num_layers
        layer = self.shape.layers[index]
        if layer.window is not None and layer.window < self.context_len:
            return 0
        return self.model.deciding(self.policy, layer, place, key_len, self.device)

    # In one forward.

    def whole(self) -> int:
        """The most bytes while the prompt is read in one forward."""
        propagation, num_layers = self.policy.propagation, self.shape.num_layers
        passes = list(propagation.prefill_passes(num_layers, self.context_len))
        peak = 0
        for number, rates in enumerate(passes):
            keeps = not propagation.restarts or number == len(passes) - 1
            peak = max(peak, self._pass([rate * self.context_len for rate in rates], keeps=keeps))
        return peak

    def _pass(self, arriving: Sequence[float], *, keeps: bool) -> int:
        """One forward over the prompt, or over what a restart has chosen of it."""
        peak = total = 0
        for index, tokens in enumerate(arriving):
            if not tokens and not (index and arriving[index - 1]):
                continue  # a layer that is not run
            here = self._reached(index, round(tokens or arriving[index - 1]))
            stored = self._stored(index) if keeps else 0
            deciding = self._deciding(index, round(tokens or arriving[index - 1]))
            moments = [here.observing + max(deciding, stored)]
            if tokens and not self._narrows(index, arriving):
                # A pass that only chooses tokens frees keys and values with the layer's end.
                still = stored if keeps else round(tokens) * self.token_bytes[index]
                moments += [here.attending, here.after + still]
            peak = max(peak, total + max(moments))
            total += stored
        return peak

    def _narrows(self, index: int, arriving: Sequence[float]) -> bool:
        """Whether a layer's output is computed for few tokens only."""
        layer = self.shape.layers[index]
        if layer.state_elements or not layer.chooses:
            return False
        last = index == len(arriving) - 1
        return last or arriving[index + 1] <= LARGEST_SHARE * arriving[index]

    def _reached(self, index: int, tokens: int) -> LayerActivations:
        """What a layer holds that some of the prompt's tokens reach."""
        loops = bool(self._states)
        if tokens >= self.context_len:
            return self.model.forward(self.context_len, loops=loops).layers[index]
        # The embeddings of all tokens are held by the decoder.
        dropped = self.context_len - tokens
        base = dropped * self.shape.hidden_size * self.model.dtype.itemsize
        # Lengths differ from layer to layer where a little is dropped after each.
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

    # In chunks.

    def in_chunks(self, chunk: int) -> int:
        """The most bytes while the prompt is read chunk by chunk.

        Every layer holds the whole prompt until the last chunk, in buffers that grow; what grew is
        held twice until the forward is over, so that a failure can be undone.
        """
        count = -(-self.context_len // chunk)
        last = self.context_len - (count - 1) * chunk
        sizes = list(self._capacities(chunk, count - 1))
        middle = self.model.forward(chunk, (count - 2) * chunk, loops=bool(self._states))
        end = self.model.forward(last, (count - 1) * chunk, loops=bool(self._states))
        peak = self._first_chunk(chunk)
        before = 0
        for number, slots in enumerate(sizes):
            peak = max(peak, self._middle_chunk(number, chunk, before, slots, middle))
            before = slots
        return max(peak, self._last_chunk(last, sizes[-1], end))

    def _capacities(self, chunk: int, count: int) -> Iterator[int]:
        """Slots of a layer's buffers behind each chunk but the last."""
        slots = self.room
        for number in range(count):
            after = (number + 1) * chunk
            if after > slots:
                slots = after + max(int(after * GROWTH_SHARE), SMALLEST_GROWTH)
            yield slots

    def _first_chunk(self, chunk: int) -> int:
        first = self.model.forward(chunk, loops=bool(self._states))
        return max(map(_most, first.layers))

    def _middle_chunk(
        self, number: int, chunk: int, before: int, slots: int, forward: Activations
    ) -> int:
        """One that is appended, from ``before`` slots of each layer to ``slots``."""
        size = sum(self.token_bytes)
        grown = slots > before
        old = size * (before if grown else slots)
        seen = number * chunk
        looks = self.policy.num_queries != 0
        queries = [looks * self._query_bytes(i) for i in range(self.shape.num_layers)]
        remembered = sum(queries) * self._remembered(seen)
        peak = total = 0
        for index, here in enumerate(forward.layers):
            total += grown * slots * self.token_bytes[index] + queries[index] * chunk
            masks = self._mask_bytes(index, chunk, seen + chunk)
            peak = max(peak, old + remembered + total + masks + _most(here))
        # Behind the last layer queries are joined, all layers' into new tensors.
        joined = sum(queries) * self._remembered(seen + chunk)
        return max(peak, old + remembered + total + joined)

    def _remembered(self, seen: int) -> int:
        shown = self.policy.num_queries
        return seen if shown is None else min(shown, seen)

    def _last_chunk(self, chunk: int, slots: int, forward: Activations) -> int:
        """The one that ends the prompt: the policy chooses in layer after layer."""
        looks = self.policy.num_queries != 0
        old = slots * sum(self.token_bytes)
        old += sum(
            looks * self._query_bytes(i) * self._remembered(self.context_len - chunk)
            for i in range(self.shape.num_layers)
        )
        peak = total = 0
        for index, here in enumerate(forward.layers):
            joined = self.context_len * self.token_bytes[index]
            # Those shown are joined, then brought into their order.
            shown = 2 * looks * self._query_bytes(index) * self._remembered(self.context_len)
            stored = self._stored(index)
            masks = self._mask_bytes(index, chunk, self.context_len)
            deciding = shown + max(self._deciding(index, self.context_len), stored)
            moments = [here.observing + joined + masks + deciding]
            if not self._narrows(index, [chunk] * self.shape.num_layers):
                moments += [here.attending + joined + masks, here.after + masks + stored]
            peak = max(peak, old + total + max(moments))
            total += stored
        return peak

    def _mask_bytes(self, index: int, query_len: int, key_len: int) -> int:
        """Bytes of the cache's own mask, beside the model's."""
        layer = self.shape.layers[index]
        if self.model.attention == "flash" or not layer.query_heads:
            return 0
        pairs = query_len * key_len
        own = 1 if self.model.attention == "sdpa" else self.model.dtype.itemsize
        if layer.window is None or layer.window >= key_len:
            return own * pairs
        # Heads may hold unlike tokens of a window: a mask for each, made of three.
        each = max(3, own + self.model.dtype.itemsize)
        return each * pairs * layer.query_heads


def _is_latent(layer: LayerShape) -> bool:
    return layer.token_elements < layer.kv_heads * (layer.key_dim + layer.value_dim)
