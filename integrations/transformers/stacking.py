"""Make caches the rows of one cache, so that their answers are decoded together."""

import copy
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.forward.arriving import ReadState
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.storage import PlainStorage
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policies import FullContext


def may_stack(cache: PolicyCache) -> bool:
    """True if a cache can be a row of another, since its answer needs only keys and values."""
    simple = cache.policy.decoding is None and isinstance(cache.storage, PlainStorage)
    return simple and all(each.plain and not each.facts.expands for each in cache.layers)


def stack(caches: Sequence[PolicyCache]) -> PolicyCache:
    """Move what caches hold, after the same prompt, into the rows of one; they are empty then."""
    stacked = PolicyCache(FullContext())
    before = [each._reader.tokens for each in caches]
    tokens = _tokens([each for each in before if each is not None])
    for layers in zip(*(each.layers for each in caches), strict=True):
        stacked.layers.append(_layer(layers, tokens))
        for each in layers:  # freed at once, so that keys are not held twice
            each.reset()
    stacked._reader.now = ReadState(tokens)
    for cache in caches:
        stacked._reader.filled_by = cache._reader.filled_by
        cache.reset()
    return stacked


def _tokens(each: Sequence[SeenTokens]) -> SeenTokens:
    rows = torch.zeros(len(each), dtype=torch.int64)
    skipped = [torch.zeros_like(it.lengths) if it.skipped is None else it.skipped for it in each]
    return attrs.evolve(each[0].take_rows(rows), skipped=torch.cat(skipped))


def _layer(layers: Sequence[PolicyLayer], tokens: SeenTokens) -> PolicyLayer:
    held = [each.tensors() for each in layers]
    longest = max(it["keys"].shape[2] for it in held)

    def rows(name: str, empty: int) -> Tensor:
        missing = [longest - it[name].shape[2] for it in held]
        axes = 2 * (held[0][name].ndim - 3)  # those behind the slots
        padding = [(*axes * (0,), count, 0) for count in missing]
        each = [pad(it[name], more, value=empty) for it, more in zip(held, padding, strict=True)]
        return torch.cat(each)

    stacked = copy.copy(layers[0])
    stacked.load(rows("keys", 0), rows("values", 0), rows("positions", -1), tokens)
    return stacked
