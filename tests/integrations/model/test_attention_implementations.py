"""flex_attention, and flash attention on a GPU: the same results as sdpa.

Flash attention without a GPU, with a stand-in for its kernels, is in tests/integrations/flash.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from transformers.utils import is_flash_attn_2_available
from transformers.utils.import_utils import is_flash_attn_4_available

from kvpolicy import CachePolicy
from kvpolicy.policies import AdaKV, FastKV, FullContext, GemFilter, PyramidInfer, SnapKV
from tests.families import FAMILIES
from tests.integrations.forward.test_narrowing import run
from tests.reference import tiny_model

POLICIES: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "snapkv": SnapKV(0.4),
    "fastkv": FastKV(tsp_rate=0.5, retention_rate=0.3),
    "gemfilter": GemFilter(retention_rate=0.4),
    "pyramidinfer": PyramidInfer(recent_rate=0.1, decay_ratio=0.3, min_context=3),
}


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
    expected, _ = run(tiny_model("llama", seed=1), policy, padded)
    with uncompiled():
        model = tiny_model("llama", seed=1, attn_implementation="flex_attention")
        assert_close(run(model, policy, padded)[0], expected)


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
            return run(model, POLICIES[name], padded)[0]

    for one, other in zip(logits(version), logits("sdpa"), strict=True):  # pragma: no cover
        assert torch.allclose(one, other, atol=0.1, rtol=0.05)
