"""flex_attention, and flash attention on a GPU: the same results as sdpa.

Flash attention without a GPU, with a stand-in for its kernels, is in tests/integrations/flash.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available
from transformers.utils.import_utils import is_flash_attn_4_available

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import AdaKV, FastKV, FullContext, GemFilter, PyramidInfer, SnapKV
from tests.families import FAMILIES
from tests.integrations.support.conversation import left_padded
from tests.reference import random_tokens, tiny_model

POLICIES: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "snapkv": SnapKV(0.4),
    "fastkv": FastKV(tsp_rate=0.5, retention_rate=0.3),
    "gemfilter": GemFilter(retention_rate=0.4),
    "pyramidinfer": PyramidInfer(recent_rate=0.1, decay_ratio=0.3, min_context=3),
}


@torch.no_grad()
def run(model: PreTrainedModel, policy: CachePolicy, padded: bool) -> list[Tensor]:
    """Logits of two turns, three tokens decoded in each."""
    rows = [random_tokens(0, 60), random_tokens(1, 43)][: 1 + padded]
    ids, mask = left_padded(rows)
    cache = PolicyCache(policy)
    logits = []
    with cache.attached(model):
        for turn in range(2):
            if turn:
                cache.start_turn()
                added = [random_tokens(5, 30), random_tokens(6, 12)][: 1 + padded]
                ids, new_mask = left_padded(added)
                mask = torch.cat([mask, new_mask], dim=1)
            for _ in range(3):
                output = model(ids, attention_mask=mask, cache=cache, logits_to_keep=1)
                logits.append(output.logits[:, -1])
                ids = torch.full((len(rows), 1), 3)
                mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            mask = mask[:, :-1]
    return logits


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@contextmanager
def uncompiled() -> Iterator[None]:
    """flex_attention by its Python code, which takes seconds where compiling takes minutes."""
    torch.compiler.set_stance("force_eager")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [*POLICIES, "adakv"])
def test_flex_attention(name: str, padded: bool) -> None:
    policy = POLICIES.get(name, AdaKV(0.4))
    expected = run(tiny_model("llama", seed=1), policy, padded)
    with uncompiled():
        model = tiny_model("llama", seed=1, attn_implementation="flex_attention")
        assert_close(run(model, policy, padded), expected)


VERSIONS = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_4": is_flash_attn_4_available,
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("version", VERSIONS)
def test_flash_attention(version: str, name: str, padded: bool) -> None:
    if not (torch.cuda.is_available() and VERSIONS[version]()):
        pytest.skip("needs a GPU and the package of flash attention")

    def logits(implementation: str) -> list[Tensor]:  # pragma: no cover
        model = FAMILIES["llama"].build(1, attn_implementation=implementation)
        model = model.to("cuda", torch.bfloat16)
        with torch.device("cuda"):
            return run(model, POLICIES[name], padded)

    for one, other in zip(logits(version), logits("sdpa"), strict=True):  # pragma: no cover
        assert torch.allclose(one, other, atol=0.1, rtol=0.05)
