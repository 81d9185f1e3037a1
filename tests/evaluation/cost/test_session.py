"""What a session was estimated to hold, against a real one whose live tensors are followed."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation import load_shape, shape_of
from kvpolicy.evaluation.cost.activations import ModelMemory
from kvpolicy.evaluation.cost.live_bytes import LiveBytes
from kvpolicy.evaluation.cost.session import Session, session_of
from kvpolicy.evaluation.cost.shapes import load_config
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import H2O, AdaKV, FastKV, FullContext, GemFilter, KVzip, SnapKV

CONTEXT, ANSWER, CHUNK = 1000, 40, 200
BOUNDED = SnapKV(0.1, decoding=SnapKV().decoding_rule(100, 16))

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 150, "sliding_window_pattern": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}


@cache
def model_of(family: str) -> PreTrainedModel:
    config = AutoConfig.for_model(
        family,
        vocab_size=101,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=None,
        pad_token_id=0,
        **FAMILIES[family],
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.eval()


def told_of(family: str, policy: CachePolicy, chunk: int | None = None) -> Session:
    config = model_of(family).config
    memory = ModelMemory(config, family, torch.float32, "sdpa")
    shape = shape_of(config, family)
    return session_of(policy, shape, memory, CONTEXT, ANSWER, chunk=chunk, device="cpu")


def run(family: str, policy: CachePolicy, chunk: int | None) -> tuple[int, int]:
    """The most bytes of a real session, and those of keys and values when it has read."""
    model, cache = model_of(family), PolicyCache(policy, max_new_tokens=ANSWER)
    ids = torch.randint(1, 101, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    chunks = {} if chunk is None else {"prefill_chunk_size": chunk}
    kept = []

    def note(*_: object) -> None:
        if cache.layers[-1].kept_len and not cache._reader.acts_next:
            total = cache.report().total
            kept.append(total.held_bytes - total.padding_bytes)

    handle = model.register_forward_hook(note)
    try:
        with LiveBytes([*model.parameters(), *model.buffers()]) as live:
            model.generate(ids, cache=cache, max_new_tokens=ANSWER, do_sample=False, **chunks)
    finally:
        handle.remove()
    return live.peak, kept[0]


CASES = [
    ("llama", FullContext(), None),
    ("llama", FullContext(), CHUNK),
    ("llama", SnapKV(0.1), None),
    ("llama", SnapKV(0.1), CHUNK),
    ("llama", BOUNDED, CHUNK),
    ("llama", H2O(0.1), None),
    ("llama", H2O(0.1), CHUNK),
    ("llama", AdaKV(0.1), None),
    ("llama", AdaKV(0.1), CHUNK),
    ("llama", FastKV(), None),
    ("llama", FastKV(), CHUNK),
    ("llama", GemFilter(), None),
    ("llama", GemFilter(), CHUNK),
    ("gemma3_text", SnapKV(0.1), None),
    ("gemma3_text", SnapKV(0.1), CHUNK),
    ("gemma3_text", FullContext(), CHUNK),
    ("gemma3_text", H2O(0.1), CHUNK),
    ("lfm2", SnapKV(0.1), None),
    ("lfm2", SnapKV(0.1), CHUNK),
]


@pytest.mark.parametrize(("family", "policy", "chunk"), CASES, ids=str)
def test_peak_and_kept_bytes_are_those_of_a_real_session(
    family: str, policy: CachePolicy, chunk: int | None
) -> None:
    told = told_of(family, policy, chunk)
    peak, kept = run(family, policy, chunk)
    assert told.peak == pytest.approx(peak, rel=0.1)
    assert told.kept == kept
    assert told.peak_when == "reading"
    assert told.kept < told.held < told.peak


@pytest.mark.parametrize("chunk", [None, CHUNK])
def test_a_second_reading_holds_the_prompt_until_all_layers_have_chosen(chunk: int | None) -> None:
    policy = KVzip(0.1, chunk_size=200)
    told = told_of("llama", policy, chunk)
    peak, kept = run("llama", policy, chunk)
    assert told.kept == kept
    assert told.peak == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize("whole", [300, CONTEXT])
def test_a_second_reading_behind_a_system_prompt(whole: int) -> None:
    policy = KVzip(0.1, chunk_size=200, whole_tokens=whole)
    told = told_of("llama", policy)
    peak, kept = run("llama", policy, None)
    assert told.kept == kept
    assert told.peak == pytest.approx(peak, rel=0.15)


def test_weights_are_counted_as_they_are_held() -> None:
    for family in FAMILIES:
        model = model_of(family)
        tensors = {each.data_ptr(): each for each in (*model.parameters(), *model.buffers())}
        memory = ModelMemory(model.config, family, torch.float32)
        assert memory.weights.bytes == sum(each.nbytes for each in tensors.values())
    llama = ModelMemory(load_config("llama-3.1-8b"), "llama-3.1-8b")
    assert llama.weights.bytes == pytest.approx(2 * 8.03e9, rel=1e-3)


@pytest.mark.parametrize("policy", [FullContext(), SnapKV(0.1)], ids=str)
def test_all_layers_hold_a_prompt_in_chunks_once(policy: CachePolicy) -> None:
    """Buffers that grow would be held twice until a forward is over; beside them is little."""
    model = model_of("llama")
    whole = CONTEXT * model.config.num_hidden_layers * 2 * 2 * 16 * 4
    peak, _ = run("llama", policy, 50)
    assert whole < peak < 1.7 * whole


def test_a_chunk_as_long_as_the_prompt_is_the_prompt() -> None:
    assert told_of("llama", FastKV(), CONTEXT) == told_of("llama", FastKV())


def test_sessions_beside_the_weights() -> None:
    session = Session(kept=10, held=20, reading=50, answering=25)
    # 100 of weights, one at work with 50, then 20 for each that waits.
    assert [session.count_in(memory, 100) for memory in (99, 149, 150, 169, 170, 211)] == [
        *(0, 0, 1, 1, 2, 4)
    ]
    assert session.peak_when == "reading"
    assert Session(kept=10, held=20, reading=5, answering=25).peak_when == "answering"


def test_attention_says_what_a_forward_holds() -> None:
    config = model_of("gemma3_text").config  # of four heads
    most = {
        name: max(
            each.attending for each in ModelMemory(config, "x", attention=name).forward(4096).layers
        )
        for name in ("flash", "sdpa", "eager")
    }
    mask = 4096**2  # numbers of a mask, and of one head's scores
    assert most["sdpa"] - most["flash"] >= mask
    assert most["eager"] > 4 * mask


def test_a_family_without_sdpa_attends_eagerly_and_what_does_not_run_is_refused() -> None:
    assert ModelMemory(load_config("gpt-oss-20b"), "gpt-oss-20b").attention == "eager"
    with pytest.raises(UnsupportedModelError, match="vit must be a decoder that runs"):
        ModelMemory(AutoConfig.for_model("vit"), "vit").forward(5)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [({"chunk": 0}, "chunk must be"), ({"answer_len": 0}, "answer_len must be")],
)
def test_numbers_below_one_are_refused(wanted: dict[str, int], message: str) -> None:
    shape = load_shape("llama-3.1-8b")
    memory = ModelMemory(load_config("llama-3.1-8b"), "llama-3.1-8b")
    given = {"answer_len": 1, "chunk": None, **wanted}
    with pytest.raises(ValueError, match=message):
        session_of(FullContext(), shape, memory, 100, **given)  # type: ignore[arg-type]
