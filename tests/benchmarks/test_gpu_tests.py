"""The tests for a GPU, run line by line on the CPU, where both sides must be the same."""

from importlib.util import find_spec

import pytest
import torch

from kvpolicy import CachePolicy
from tests.integrations.gpu import test_gpu as of_gpu

BOUNDED = of_gpu.SnapKV(retention_tokens=24, decoding=True)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_gpu, "DEVICE", "cpu")


@pytest.mark.parametrize("name", of_gpu.MODELS)
def test_every_model(name: str) -> None:
    of_gpu.test_keeps_and_says_what_the_cpu_does(name, of_gpu.FastKV(tsp_rate=0.4))


@pytest.mark.parametrize("policy", of_gpu.POLICIES, ids=str)
def test_every_policy(policy: CachePolicy) -> None:
    of_gpu.test_keeps_and_says_what_the_cpu_does("llama", policy)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, to interpret them")
def test_kernels() -> None:
    of_gpu.test_the_kernels_that_sum_attention(torch.float16, 80)


@pytest.mark.parametrize("policy", [of_gpu.SnapKV(retention_rate=0.2), of_gpu.FastKV(), BOUNDED])
def test_fixed_buffers(policy: CachePolicy) -> None:
    of_gpu.test_compiled_decoding_says_what_the_loop_says(policy)
