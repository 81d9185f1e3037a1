"""Unequal heads, packed and padded: both caches hold the same."""

import torch

from benchmarks import unequal_heads
from benchmarks.common import TINY, random_prompt
from kvpolicy.integrations.transformers.state.packed import Packed


def test_the_padded_copy_holds_the_same_in_more_bytes() -> None:
    model = TINY.build()
    cache = unequal_heads.read(model, random_prompt(model.config.vocab_size, 200), 0.3)
    other = unequal_heads.padded(cache)
    unlike = 0
    for one, twin in zip(cache.layers, other.layers, strict=True):
        unlike += isinstance(one.held, Packed)
        assert not isinstance(twin.held, Packed)
        assert torch.equal(one.positions, twin.positions)
        assert torch.equal(one.keys, twin.keys)
        assert torch.equal(one.values, twin.values)
    assert unlike
    found = unequal_heads.shares(cache)
    assert found["kept"] == 0.3
    assert found["kept"] <= found["held"] < found["padded"]
