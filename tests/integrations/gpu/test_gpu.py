"""A policy on a GPU against the same on the CPU: what is kept, and what is said.

Skipped where torch sees no GPU. In float32 with exact matrix products, both must choose the same.
"""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    FastKV,
    GemFilter,
    KeyDiff,
    PyramidInfer,
    PyramidKV,
    ReplayKV,
    SnapKV,
    StreamingLLM,
)
from tests.reference.mixed_models import hybrid_model, latent_model
from tests.reference.models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

POLICIES: tuple[CachePolicy, ...] = (
    FastKV(tsp_rate=0.4, retention_rate=0.2),
    SnapKV(retention_rate=0.2),
    H2O(retention_rate=0.2),
    StreamingLLM(retention_rate=0.2),
    GemFilter(retention_rate=0.4),
    PyramidInfer(),
    PyramidKV(retention_rate=0.2),
    AdaKV(retention_rate=0.2),
    TOVA(retention_rate=0.2),
    KeyDiff(retention_rate=0.2),
    RKV(retention_rate=0.2),
    ReplayKV(retention_rate=0.2, tsp_rate=0.6),
)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": partial(tiny_model, "llama", seed=3),
    "qwen3": partial(tiny_model, "qwen3", seed=3),
    "deepseek_v3": partial(latent_model, 3),
    "qwen3_next": partial(hybrid_model, 3),
}
NEW_TOKENS = 12
DEVICE = "cuda"  # the tests of the benchmarks run the same lines on the CPU


@pytest.fixture(autouse=True)
def _exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def _both(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    model = MODELS[name]()
    return model, copy.deepcopy(model).to(DEVICE)


def _padded() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, VOCAB_SIZE, (2, 70), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :23] = 0
    return ids, mask


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_keeps_and_says_what_the_cpu_does(name: str, policy: CachePolicy) -> None:
    if name == "qwen3_next" and isinstance(policy, PyramidInfer):
        pytest.skip("drops after every layer, of which some are recurrent")
    ids, mask = _padded()
    kept, said = [], []
    for model in _both(name):
        cache = PolicyCache(policy)
        output = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            cache=cache,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        positions = [layer.positions for layer in cache.layers]
        kept.append([each.cpu() for each in positions if each is not None])
        said.append(torch.stack(output.logits).cpu())
    for ours, theirs in zip(*kept, strict=True):
        assert torch.equal(ours, theirs)
    assert float((said[0] - said[1]).abs().max()) < 1e-3 * float(said[0].abs().max())


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernels_that_sum_attention(dtype: torch.dtype, head_dim: int) -> None:
    from kvpolicy.fused import check_kernels

    check_kernels(torch.device(DEVICE), dtype, head_dim)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("policy", [SnapKV(retention_rate=0.2), FastKV()], ids=str)
def test_compiled_decoding_says_what_the_loop_says(policy: CachePolicy) -> None:
    _, model = _both("llama")
    ids, _ = _padded()
    answers = []
    for room in (None, 40):
        cache = PolicyCache(policy, max_new_tokens=room)
        answers.append(
            model.generate(
                ids.to(DEVICE), cache=cache, max_new_tokens=40, min_new_tokens=40, do_sample=False
            )
        )
    assert torch.equal(*answers)
