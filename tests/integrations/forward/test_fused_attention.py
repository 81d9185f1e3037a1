"""Policies that sum the attention of all queries, with the fused kernels in place of blocks."""

from typing import Any

import pytest
import torch

from kvpolicy import CachePolicy, attention
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import H2O, KVzip
from tests.reference.models import VOCAB_SIZE, tiny_model

pytest.importorskip("triton")
from kvpolicy import fused


@pytest.mark.parametrize("policy", [H2O(0.3), KVzip(0.3)], ids=["h2o", "kvzip"])
def test_what_is_kept_does_not_change(policy: CachePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, one of them padded, in half precision."""
    model = tiny_model("llama", seed=3).to(torch.float16)
    ids = torch.randint(1, VOCAB_SIZE, (2, 90), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    used, columns = [], fused.attention_columns

    def watched(*given: Any, **how: Any) -> torch.Tensor:
        used.append(how)
        return columns(*given, **how)

    monkeypatch.setattr(fused, "attention_columns", watched)
    kept = []
    for devices in ({"cpu"}, set()):
        monkeypatch.setattr(attention, "FUSED_DEVICES", devices)
        attention._has_kernels.cache_clear()
        used.clear()
        cache = PolicyCache(policy)
        model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=2, do_sample=False)
        kept.append([layer.positions for layer in cache.layers])
        assert (len(used) > 2) is bool(devices)  # two are the kernels' check
    for one, other in zip(*kept, strict=True):
        assert torch.equal(one, other)
