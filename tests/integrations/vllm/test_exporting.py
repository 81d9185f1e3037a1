"""An exported document gives, in stock attention from position m on, the answers of its cache."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import OffloadedStorage, PolicyCache, QuantizedStorage
from kvpolicy.integrations.vllm import ServedDocument, export
from kvpolicy.policies import (
    AdaKV,
    FastKV,
    FullContext,
    GemFilter,
    KeyDiff,
    PyramidInfer,
    PyramidKV,
    SnapKV,
    StreamingLLM,
)
from kvpolicy.policy import CachePolicy
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.vllm.plain import appended_logits, read_prompt, served_logits
from tests.reference import tiny_model

PROMPT = torch.randint(0, 97, (1, 61), generator=torch.Generator().manual_seed(5))
QUESTION = torch.tensor([3, 41, 59, 26])
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def peaked(model: Any, seed: int = 1) -> Any:
    """A model whose random weights make peaked attention, so that a wrong angle shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            size = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            size = size if "proj" in name else 1.0
            values = torch.randn(weight.shape, generator=generator)
            weight.data = values * size / math.sqrt(weight.shape[1])
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama", seed=1)


def check_served(model: Any, policy: CachePolicy, path: Path) -> ServedDocument:
    cache = read_prompt(model, policy, PROMPT)
    document = export(cache, model, path / "it.safetensors")
    wanted = appended_logits(model, cache, QUESTION)
    dense = model(torch.cat([PROMPT[0], QUESTION])[None]).logits[0, -len(QUESTION) :].detach()
    again = ServedDocument.load(document.path)
    torch.testing.assert_close(served_logits(model, again, QUESTION), wanted, atol=2e-4, rtol=0)
    if document.length < document.read_len:  # else a test could not see what was evicted
        assert (wanted - dense).abs().max() > 0.01
    return again


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_every_rope_kind_with_gaps(rope: dict[str, Any], tmp_path: Path) -> None:
    model = peaked(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)))
    document = check_served(model, SnapKV(0.3, window_size=4), tmp_path)
    assert document.read_len == 61
    assert document.length == 18


@pytest.mark.parametrize(
    "policy",
    [
        StreamingLLM(0.3, gapless=True),
        StreamingLLM(0.4),
        KeyDiff(0.5),
        FastKV(tsp_rate=0.5, retention_rate=0.3, window_size=4),
        GemFilter(retention_rate=0.4),
        FullContext(),
    ],
    ids=str,
)
def test_every_kind_of_policy(policy: CachePolicy, llama: Any, tmp_path: Path) -> None:
    document = check_served(llama, policy, tmp_path)
    assert document.facts.policy_text == str(policy)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_other_families(family: Any, tmp_path: Path) -> None:
    check_served(tiny_model(family, seed=2), SnapKV(0.3, window_size=4), tmp_path)


@pytest.mark.parametrize("kind", ["neighbouring channels", "some channels"])
def test_other_layouts_of_rotated_channels(kind: str, tmp_path: Path) -> None:
    if kind == "some channels":
        config: Any = GlmConfig(**SIZES, head_dim=8, partial_rotary_factor=0.5)
        model = GlmForCausalLM(config)
    else:
        model = CohereForCausalLM(CohereConfig(**SIZES, logit_scale=1.0))
    check_served(peaked(model), SnapKV(0.3, window_size=4), tmp_path)


def test_after_several_turns_and_an_answer(llama: Any, tmp_path: Path) -> None:
    cache = PolicyCache(FastKV(tsp_rate=0.5, retention_rate=0.3, window_size=4))
    first = llama.generate(PROMPT[:, :40], cache=cache, max_new_tokens=3)
    second = torch.cat([first, PROMPT[:, 40:]], dim=1)
    llama.generate(second, cache=cache, max_new_tokens=4)
    document = export(cache, llama, tmp_path / "it.safetensors")
    assert document.read_len == cache.get_seq_length() == 67
    wanted = appended_logits(llama, cache, QUESTION)
    torch.testing.assert_close(served_logits(llama, document, QUESTION), wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("policy", [SnapKV(0.3, window_size=4), GemFilter(retention_rate=0.4)])
def test_a_row_of_a_padded_batch(policy: CachePolicy, llama: Any, tmp_path: Path) -> None:
    short = PROMPT[:, :44]
    ids = torch.cat([PROMPT, torch.nn.functional.pad(short, (17, 0))])
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    cache = read_prompt(llama, policy, ids, mask)
    with pytest.raises(ValueError, match="row must be given for a cache of 2 rows with padding"):
        export(cache, llama, tmp_path / "it.safetensors")
    for row, alone in ((0, PROMPT), (1, short)):
        document = export(cache, llama, tmp_path / "it.safetensors", row=row)
        own = read_prompt(llama, policy, alone)
        assert document.read_len == alone.shape[1]
        assert document.length == own.layers[0].kept_len
        torch.testing.assert_close(
            served_logits(llama, document, QUESTION),
            appended_logits(llama, own, QUESTION),
            atol=2e-4,
            rtol=0,
        )
    with pytest.raises(ValueError, match="row must be at most 1, got 2"):
        export(cache, llama, tmp_path / "it.safetensors", row=2)


def test_offloaded_and_saved_caches(llama: Any, tmp_path: Path) -> None:
    cache = PolicyCache(SnapKV(0.3, window_size=4), OffloadedStorage())
    with torch.no_grad(), cache.attached(llama):
        llama(PROMPT, cache=cache)
    cache.save(tmp_path / "saved")
    loaded = PolicyCache.load(tmp_path / "saved")
    for each in (cache, loaded):
        document = export(each, llama, tmp_path / "it.safetensors")
        torch.testing.assert_close(
            served_logits(llama, document, QUESTION),
            appended_logits(llama, copy.deepcopy(loaded), QUESTION),
            atol=2e-4,
            rtol=0,
        )
    assert cache.layers[0].kept_len == 18  # it is not changed


def test_lower_precision_is_turned_in_higher(tmp_path: Path) -> None:
    """The keys of a bfloat16 cache are rotated with one rounding."""
    model = tiny_model("llama", seed=1).to(torch.bfloat16)
    cache = read_prompt(model, SnapKV(0.3, window_size=4), PROMPT)
    document = export(cache, model, tmp_path / "it.safetensors")
    assert document.facts.dtype == "bfloat16"
    own = cache.layers[1].keys[0].double()
    got = document.entries([1])[1][0].transpose(0, 1)
    assert got.dtype == torch.bfloat16
    by = torch.tensor(float(document.length - 61), dtype=torch.float64)
    angles = by * model.model.rotary_emb.inv_freq.double()
    first, second = own.chunk(2, dim=-1)
    wanted = torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        dim=-1,
    )
    assert torch.equal(got, wanted.to(torch.bfloat16))


@pytest.mark.parametrize(
    "policy",
    [AdaKV(0.3, window_size=4), PyramidKV(0.3, window_size=4), PyramidInfer(min_context=4)],
    ids=str,
)
def test_unequal_numbers_are_refused(policy: CachePolicy, llama: Any, tmp_path: Path) -> None:
    cache = read_prompt(llama, policy, PROMPT)
    with pytest.raises(
        ValueError, match=r"equally many tokens in every head .* under .*SnapKV"
    ) as said:
        export(cache, llama, tmp_path / "it.safetensors")
    assert str(policy) in str(said.value)
    assert list(tmp_path.iterdir()) == []


def refusal(model: Any, path: Path) -> str:
    cache = PolicyCache(StreamingLLM(retention_tokens=20))
    with pytest.raises(UnsupportedModelError) as said:
        export(cache, model.eval(), path / "it.safetensors")
    return str(said.value)


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        ("gemma2", "layer 0 is of the kind sliding window"),
        ("llama4_text", "layer 0 is of the kind chunked attention"),
        ("deepseek_v3", "layer 0 is of the kind latent attention"),
        ("lfm2", "layer 0 is of the kind recurrent"),
        ("falcon_h1", "layer 0 is of the kind attention and recurrent"),
        ("gemma3n_text", "layer 0 is of the kind sliding window"),
    ],
)
def test_models_are_refused_by_their_layers(build: str, kind: str, tmp_path: Path) -> None:
    assert kind in refusal(builds()[build].model(), tmp_path)


def test_shared_keys_are_refused(tmp_path: Path) -> None:
    model = builds()["gemma3n_text"].model()
    config = model.config
    config.layer_types = ["full_attention"] * len(config.layer_types)
    said = refusal(type(model)(config), tmp_path)
    assert "layer 2 is of the kind shared keys" in said


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic or LongRoPE"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "factor": 2.0,
                "original_max_position_embeddings": 32,
            },
            "dynamic or LongRoPE",
        ),
        ({"rope_type": "default", "mrope_section": [2, 1, 1]}, "several axes"),
    ],
    ids=["dynamic", "longrope", "axes"],
)
def test_ropes_are_refused(rope: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, rope_parameters={"rope_theta": 10000.0, **rope})
    assert reason in refusal(LlamaForCausalLM(config), tmp_path)


def test_absolute_positions_are_refused(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=97, n_embd=24, n_layer=2, n_head=2, n_positions=128)
    model = GPT2LMHeadModel(config).eval()
    cache = read_prompt(model, StreamingLLM(0.4), PROMPT)
    with pytest.raises(UnsupportedModelError, match="gets no rotary embedding"):
        export(cache, model, tmp_path / "it.safetensors")


def test_caches_are_refused_by_what_they_hold(llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "it.safetensors"
    with pytest.raises(ValueError, match="cache must have read a whole prompt"):
        export(PolicyCache(SnapKV()), llama, path)
    cache = read_prompt(llama, SnapKV(0.3, window_size=4), PROMPT)
    with pytest.raises(ValueError, match="model must be the one that filled the cache"):
        export(cache, tiny_model("llama", seed=9), path)
    cache = PolicyCache(SnapKV(0.3, window_size=4), QuantizedStorage(q_group_size=8))
    with torch.no_grad(), cache.attached(llama):
        llama(PROMPT, cache=cache)
    with pytest.raises(ValueError, match="storage of the cache must hold keys exactly"):
        export(cache, llama, path)


@pytest.mark.parametrize("name", ["it.bin", ".safetensors", "a b.safetensors", "-x.safetensors"])
def test_names_that_no_request_could_have(name: str, llama: Any, tmp_path: Path) -> None:
    cache = read_prompt(llama, SnapKV(0.3, window_size=4), PROMPT)
    with pytest.raises(ValueError, match=r"path must be NAME\.safetensors"):
        export(cache, llama, tmp_path / name)
    with pytest.raises(ValueError, match="folder that exists"):
        export(cache, llama, tmp_path / "none" / "it.safetensors")
