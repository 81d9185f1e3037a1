"""Under flash attention every method keeps, drops and answers what it does under sdpa.

Two turns of `generate`, with rows that are padded on the left in both. Methods whose heads hold
different numbers of tokens are refused, as are drops above sliding windows: see test_refused.py.
"""

from typing import Any

import pytest

from kvpolicy import CachePolicy
from kvpolicy.policies import (
    H2O,
    RKV,
    TOVA,
    CurDKV,
    FastKV,
    FastV,
    FullContext,
    GemFilter,
    KeyDiff,
    KeyNorm,
    KVzip,
    PyramidInfer,
    Random,
    ReplayKV,
    SnapKV,
    StreamingLLM,
)
from kvpolicy.registry import registered
from tests.integrations.decoding.support import bounded
from tests.integrations.flash.support import assert_as_sdpa
from tests.integrations.support.conversation import METHODS, Lengths
from tests.integrations.support.versions import OLD

KVZIP = KVzip(0.3, chunk_size=19, num_sinks=3, overlap=4, head_uniform=True)
# The methods that are in no table of references.
OTHERS: dict[str, CachePolicy] = {
    "curdkv": CurDKV(0.3),
    "fastv": FastV(tsp_rate=0.5),
    "key_norm": KeyNorm(0.3),
    "kvzip": KVZIP,
    "random": Random(0.3),
    "replaykv_alike": ReplayKV(0.3, head_uniform=True),
    "rkv": RKV(0.3),
}
POLICIES = {name: policy for name, (policy, _) in METHODS.items()} | OTHERS
UNEQUAL = {name for name, policy in POLICIES.items() if policy.selector.unequal_heads}
EQUAL = [name for name in POLICIES if name not in UNEQUAL]
EVICTING = ("full_context", "streamingllm", "snapkv", "h2o", "pyramidkv", "kvzip", "replaykv")


def test_all_methods_are_compared() -> None:
    methods = {type(policy) for policy in POLICIES.values()}
    assert methods >= set(registered("policy").values())
    assert sorted(UNEQUAL) == ["ada_kv_group_first", "adakv", "nestedkv"]


@pytest.mark.parametrize("name", EQUAL)
def test_methods(name: str) -> None:
    assert_as_sdpa("llama", POLICIES[name])


@pytest.mark.parametrize("name", [*EVICTING, "fastkv", "gemfilter", "pyramidinfer", "two_stages"])
def test_methods_without_padding(name: str) -> None:
    assert_as_sdpa("qwen3", POLICIES[name], "one")


@pytest.mark.parametrize("rows", ["one", "padded"])
@pytest.mark.parametrize("name", EVICTING)
def test_methods_beside_sliding_windows(name: str, rows: str) -> None:
    assert_as_sdpa("gemma3", POLICIES[name], rows)


@pytest.mark.skipif(OLD, reason="this Transformers cuts the masks of later chunks wrongly")
@pytest.mark.parametrize(
    ("model", "policy", "rows", "size"),
    [
        ("llama", SnapKV(0.3), "padded", 11),
        ("llama", FastKV(tsp_rate=0.4, retention_rate=0.25), "padded", 11),
        ("llama", GemFilter(retention_rate=0.3), "padded", 11),
        ("llama", PyramidInfer(min_context=8), "one", 3),
        ("llama", KVZIP, "padded", 11),
        ("qwen3", FastKV(tsp_rate=0.4, retention_rate=0.25), "one", 3),
        ("qwen3", GemFilter(retention_rate=0.3), "one", 3),
        ("qwen3", StreamingLLM(0.3), "padded", 3),
        ("gemma3", SnapKV(0.3), "padded", 11),
        ("gemma3", StreamingLLM(0.3), "one", 3),
        ("gemma3", KVZIP, "one", 11),
    ],
)
def test_prompts_in_chunks(model: str, policy: CachePolicy, rows: str, size: int) -> None:
    assert_as_sdpa(model, policy, rows, prefill_chunk_size=size)


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        ("llama", SnapKV(0.3)),
        ("qwen3", FastKV(tsp_rate=0.4, retention_rate=0.25)),
        ("gemma3", StreamingLLM(0.3)),
    ],
)
def test_drafts(model: str, policy: CachePolicy) -> None:
    assert_as_sdpa(model, policy, "one", prompt_lookup_num_tokens=3)


BOUNDS = {each: bounded(each, 12, 3) for each in (StreamingLLM, H2O, TOVA, SnapKV, KeyDiff, RKV)}
LONG_ANSWERS = Lengths(first=(47, 31, 23), second=(11, 19, 3), num_decode=10)


@pytest.mark.parametrize(
    ("model", "method", "rows"),
    [
        *(("llama", method, "padded") for method in BOUNDS),
        ("qwen3", H2O, "one"),
        ("gemma3", SnapKV, "padded"),
        ("gemma3", StreamingLLM, "one"),
    ],
)
def test_bounded_answers(model: str, method: Any, rows: str) -> None:
    assert_as_sdpa(model, BOUNDS[method], rows, lengths=LONG_ANSWERS)


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        ("gemma2", SnapKV(0.3)),  # capped scores
        ("gemma3n", SnapKV(0.3)),  # layers that use another layer's keys
        ("deepseek_v3", FastKV(tsp_rate=0.4, retention_rate=0.25)),  # latent attention
        ("lfm2", FullContext()),  # recurrent layers
    ],
)
def test_kinds_of_layers(model: str, policy: CachePolicy) -> None:
    assert_as_sdpa(model, policy, "one" if model == "lfm2" else "padded")


@pytest.mark.parametrize("version", ["flash_attention_3", "flash_attention_4"])
@pytest.mark.parametrize("rows", ["one", "padded"])
@pytest.mark.parametrize("name", ["snapkv", "fastkv", "gemfilter"])
def test_later_versions(name: str, rows: str, version: str) -> None:
    assert_as_sdpa("llama", POLICIES[name], rows, version)


@pytest.mark.parametrize("rows", ["one", "padded"])
@pytest.mark.parametrize("policy", [SnapKV(0.3), ReplayKV(0.3, head_uniform=True)], ids=str)
def test_sinks(policy: CachePolicy, rows: str) -> None:
    """Of GPT-OSS, which Transformers loads under no earlier version of the package."""
    assert_as_sdpa("gpt_oss", policy, rows, "flash_attention_4")
