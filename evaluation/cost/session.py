"""Compute the bytes of a session while its prompt is read and its answer is decoded.

This follows how `PolicyCache` reads. In one forward, a layer's keys and values are freed when the
policy has chosen among them; in chunks, the layers that all tokens reach hold the whole prompt
until its end has come.
"""

from __future__ import annotations

import math
from typing import Any

import attrs

from kvpolicy.checks import check_count, check_kind
from kvpolicy.evaluation.cost.activations import ModelMemory
from kvpolicy.evaluation.cost.chunked_reading import ChunkedReading
from kvpolicy.evaluation.cost.estimate import estimate
from kvpolicy.evaluation.cost.model_shape import ModelShape
from kvpolicy.evaluation.cost.reading import Reading, most_of
from kvpolicy.evaluation.cost.second_reading import choosing_bytes
from kvpolicy.policy import CachePolicy

# Bytes for each token of the context besides what layers hold: its id, its position and whether it
# is padding. `generate` holds as much itself while it runs.
TOKEN_BYTES = 3 * 8


@attrs.frozen
class Session:
    """The memory in bytes that one prompt and its answer take, without the model's weights.

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
        """The peak bytes while the prompt is read or the answer is decoded."""
        return max(self.reading, self.answering)

    @property
    def peak_when(self) -> str:
        """The phase with the peak memory: ``"reading"`` or ``"answering"``."""
        return "reading" if self.reading >= self.answering else "answering"

    def count_in(self, memory: int, weights: int) -> int:
        """Return how many sessions fit into a memory if only one runs at a time.

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
) -> Session:
    """Compute the memory that one prompt and its answer take under a policy.

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
    given: dict[str, Any] = {
        "policy": policy,
        "shape": shape,
        "model": model,
        "context_len": context_len,
        "room": answer_len if every is None else min(answer_len, every),
        "kept": kept,
        "token_bytes": found.token_bytes,
        "device": device,
    }
    reading = Reading(**given)
    if chunk is not None and chunk < context_len:
        reading = ChunkedReading(**given, chunk=chunk)
    peak = reading.most()
    if policy.decides_later:
        peak = max(peak, reading.when_read() + choosing_bytes(reading))
    tokens = (context_len + answer_len) * TOKEN_BYTES
    end, most = reading.while_answering(answer_len)
    step = model.forward(1, max(kept) + 1)
    working = max(step.head, *map(most_of, step.layers))
    return Session(
        kept=sum(tokens * size for tokens, size in held) + found.state_bytes,
        held=end + found.state_bytes + tokens,
        reading=peak + 2 * tokens,
        answering=most + found.state_bytes + working + 2 * tokens,
    )
