"""Measure heads that keep different numbers of tokens: bytes held, and time per token.

After a prompt, a copy of the cache is padded: every head gets as many slots as the head that keeps
most. Both caches decode the same tokens in turns; ratios are of the same round.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.clocks import timed
from benchmarks.common import random_prompt, spread
from benchmarks.harness import Row, in_turns, ratios
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.state.packed import Packed
from kvpolicy.policies import AdaKV

# Tokens that one cache decodes before it is the other's turn.
BLOCK = 16


def read(model: PreTrainedModel, prompt: Tensor, rate: float) -> PolicyCache:
    """Read a prompt and return its cache."""
    cache = PolicyCache(AdaKV(rate))
    with torch.no_grad(), cache.attached(model):
        model(prompt, cache=cache, logits_to_keep=1)
    return cache


def padded(cache: PolicyCache) -> PolicyCache:
    """Return a copy of a cache with all heads padded to the same length."""
    other = copy.deepcopy(cache)
    for layer in other.layers:
        if isinstance(layer.held, Packed):
            layer.held = layer.held.unpacked()
    return other


def shares(cache: PolicyCache) -> dict[str, float]:
    """Return a cache's bytes divided by a full cache's: tokens kept, as held, and if padded."""
    total, other = cache.report().total, padded(cache)
    return {
        "kept": (total.held_bytes - total.padding_bytes) / total.full_bytes,
        "held": sum(layer.nbytes() for layer in cache.layers) / total.full_bytes,
        "padded": sum(layer.nbytes() for layer in other.layers) / total.full_bytes,
    }


def block_ms(model: PreTrainedModel, cache: PolicyCache) -> float:
    """Return the milliseconds of a decoded token, averaged over a block of tokens.

    They are the processor's; on a GPU, where the processor waits for it, those on the clock.
    """
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)

    def block() -> None:
        for _ in range(BLOCK):
            model(token, cache=cache)

    with torch.no_grad(), cache.attached(model):
        _, interval = timed(model.device, block)
    return (interval.wall_ms if model.device.type == "cuda" else interval.cpu_ms) / BLOCK


def row_of(model: PreTrainedModel, context: int, rate: float, rounds: int) -> Row:
    """Return the results at one rate, on a model with random weights."""
    prompt = random_prompt(model.config.vocab_size, context).to(model.device)
    packed = read(model, prompt, rate)
    row = {"model": "random", "context": context, "rate": rate, **shares(packed)}
    caches = {"padded": padded(packed), "packed": packed}
    turns = {name: partial(block_ms, model, cache) for name, cache in caches.items()}
    taken = in_turns(turns, rounds)
    return {
        **row,
        "padded_ms": taken["padded"],
        "packed_ms": taken["packed"],
        "of_padded": spread(ratios(taken["packed"], taken["padded"])),
    }
