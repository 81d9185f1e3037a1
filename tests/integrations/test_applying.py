"""A policy that is applied to a model acts as a new cache in every `generate` does."""

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers import PlainStorage, PolicyCache, apply_policy, applying
from kvpolicy.integrations.transformers.surface import CACHE, cache_of
from kvpolicy.policies import FastKV, FullContext, SnapKV
from tests.integrations.lm_eval.support import char_tokenizer, documents
from tests.integrations.support.conversation import left_padded
from tests.integrations.support.reading import marks_on
from tests.integrations.test_surroundings import with_lora
from tests.reference import random_tokens, tiny_model

POLICIES: dict[str, CachePolicy] = {
    "snapkv": SnapKV(0.2),
    "fastkv": FastKV(tsp_rate=0.4, retention_rate=0.2),
}
# A prompt that repeats itself, so that looking it up proposes something.
IDS = torch.tensor([random_tokens(0, 20) * 3])
NEW = 8


@pytest.fixture(scope="module")
def draft_model() -> PreTrainedModel:
    return tiny_model("llama", seed=2)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert dict(applying._applied) == {}


def generate(model: Any, **how: Any) -> Tensor:
    torch.manual_seed(5)
    how = {"max_new_tokens": NEW, "do_sample": False, **how}
    if "inputs_embeds" not in how:
        how = {"input_ids": IDS, **how}
    output: Tensor = model.generate(**how)
    return output


PADDED_IDS, PADDED_MASK = left_padded([random_tokens(0, 50), random_tokens(1, 31)])
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "padded": {"input_ids": PADDED_IDS, "attention_mask": PADDED_MASK},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "chunks": {"prefill_chunk_size": 24},
    "no cache by name": {CACHE: None},
    "config": {"generation_config": GenerationConfig(max_new_tokens=NEW, do_sample=False)},
}


@pytest.mark.filterwarnings("ignore:.*generation_config")
@pytest.mark.parametrize("how", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", POLICIES)
def test_every_mode_gives_what_a_new_cache_gives(
    model: PreTrainedModel, name: str, how: dict[str, Any]
) -> None:
    cache, before = PolicyCache(POLICIES[name]), marks_on(model)
    want = generate(model, **{**how, CACHE: cache})
    plain = generate(model, **how)
    with apply_policy(model, POLICIES[name]) as applied:
        assert marks_on(model) == before
        for _ in range(2):  # the second call begins anew, too
            assert torch.equal(generate(model, **how), want)
    assert applied.policy is POLICIES[name]
    assert applied.reports == (cache.report(),) * 2
    assert torch.equal(generate(model, **how), plain)
    assert len(applied.reports) == 2
    assert marks_on(model) == before


def test_the_policies_of_these_tests_change_answers(model: PreTrainedModel) -> None:
    for policy in POLICIES.values():
        assert not torch.equal(generate(model, cache=PolicyCache(policy)), generate(model))


@pytest.mark.parametrize("name", POLICIES)
def test_embeddings(model: PreTrainedModel, name: str) -> None:
    embeds = model.get_input_embeddings()(IDS).detach()
    want = generate(model, inputs_embeds=embeds, cache=PolicyCache(POLICIES[name]))
    with apply_policy(model, POLICIES[name]) as applied, torch.inference_mode():
        assert torch.equal(generate(model, inputs_embeds=embeds), want)
    assert applied.reports[0].total.seen == 60 + NEW - 1


@pytest.mark.filterwarnings("ignore:.*generation_config")
@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("itself", [False, True])
def test_a_draft_model_reads_without_the_policy(
    model: PreTrainedModel, draft_model: PreTrainedModel, itself: bool, also: bool
) -> None:
    """Also one that has a policy applied, and a model that drafts for itself."""
    helper = model if itself else draft_model
    cache = PolicyCache(POLICIES["snapkv"])
    want = generate(model, assistant_model=helper, cache=cache)
    other = apply_policy(draft_model, SnapKV(0.5)) if also else None
    with apply_policy(model, POLICIES["snapkv"]) as applied:
        assert torch.equal(generate(model, assistant_model=helper), want)
    assert applied.reports == (cache.report(),)
    if other is not None:
        assert other.reports == ()
        other.remove()


def test_a_cache_that_a_call_brings_is_used_as_without(model: PreTrainedModel) -> None:
    own, other = PolicyCache(SnapKV(0.5)), PolicyCache(SnapKV(0.5))
    full, dynamic = generate(model), DynamicCache()
    want = generate(model, cache=own)
    with apply_policy(model, POLICIES["fastkv"]) as applied:
        assert torch.equal(generate(model, cache=other), want)
        assert torch.equal(generate(model, **{CACHE: dynamic}), full)
        with pytest.raises(TypeError, match=f"{CACHE} must be a cache, got the class"):
            generate(model, cache=PolicyCache)
    assert applied.reports == ()
    assert other.report() == own.report()
    assert dynamic.get_seq_length() == 60 + NEW - 1


def test_storage_room_and_number_of_reports(model: PreTrainedModel) -> None:
    made: list[PolicyCache] = []
    with apply_policy(
        model, SnapKV(0.3), storage=PlainStorage(), max_new_tokens=NEW, reports=2
    ) as applied:
        for length in (60, 50, 40):
            output = generate(model, input_ids=IDS[:, :length], return_dict_in_generate=True)
            made.append(cache_of(output))
    assert [each.total.seen for each in applied.reports] == [50 + NEW - 1, 40 + NEW - 1]
    assert len({id(cache) for cache in made}) == 3
    assert all(cache.storage is applied.storage for cache in made)
    assert {cache.max_new_tokens for cache in made} == {NEW}
    with apply_policy(model, SnapKV(0.3), reports=0) as silent:
        generate(model)
    assert silent.reports == ()


# What people call


def test_a_pipeline(model: PreTrainedModel) -> None:
    tokenizer = char_tokenizer()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = [each["context"] for each in documents(3)]
    how = {"max_new_tokens": NEW, "do_sample": False}

    def with_cache(given: Any, **more: Any) -> Any:
        return pipe(given, cache=PolicyCache(POLICIES["fastkv"]), **how, **more)

    chat = [{"role": "user", "content": texts[1]}]
    alone = [with_cache(text) for text in texts]
    pair, third = with_cache(texts[:2], batch_size=2), alone[2]
    said, before = with_cache(chat), marks_on(model)
    assert alone != [pipe(text, **how) for text in texts]
    with apply_policy(model, POLICIES["fastkv"]) as applied:
        assert pipe(texts[0], **how) == alone[0]
        assert pipe(texts, **how) == alone  # one after the other
        assert pipe(texts, batch_size=2, **how) == [*pair, third]
        assert pipe(chat, **how) == said
    assert len(applied.reports) == 1 + 3 + 2 + 1
    assert marks_on(model) == before


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("outside", [False, True])
def test_peft(outside: bool) -> None:
    """A policy applied to the wrapper or to the model inside: both generate under it."""
    inside = tiny_model("llama", seed=1)
    wrapped = with_lora(inside)
    want = generate(wrapped, cache=PolicyCache(POLICIES["fastkv"]))
    with apply_policy(wrapped if outside else inside, POLICIES["fastkv"]) as applied:
        assert torch.equal(generate(wrapped), want)
        assert torch.equal(generate(inside), want)
        with pytest.raises(ValueError, match="model must have no policy applied"):
            apply_policy(inside if outside else wrapped, POLICIES["snapkv"])
    assert len(applied.reports) == 2


# Models, copies, threads


def test_models_and_copies_do_not_meet(
    model: PreTrainedModel, draft_model: PreTrainedModel
) -> None:
    want = {
        name: generate(each, cache=PolicyCache(POLICIES[name]))
        for name, each in (("snapkv", model), ("fastkv", draft_model))
    }
    full = generate(model)
    with apply_policy(model, POLICIES["snapkv"]) as one:
        twin = copy.deepcopy(model)
        other = apply_policy(draft_model, POLICIES["fastkv"])
        assert torch.equal(generate(twin), full)
        assert torch.equal(generate(draft_model), want["fastkv"])
        assert torch.equal(generate(model), want["snapkv"])
        other.remove()
        assert torch.equal(generate(model), want["snapkv"])
    assert (len(one.reports), len(other.reports)) == (2, 1)


def test_threads(model: PreTrainedModel) -> None:
    prompts = [torch.tensor([random_tokens(seed, 50 + seed)]) for seed in range(3)]
    want = [
        generate(model, input_ids=ids, cache=PolicyCache(POLICIES["fastkv"])) for ids in prompts
    ]
    found: dict[int, list[Tensor]] = {index: [] for index in range(3)}
    start = threading.Barrier(3)

    def work(index: int) -> None:
        start.wait()
        for _ in range(3):
            how = {"max_new_tokens": NEW, "do_sample": False}
            found[index].append(model.generate(prompts[index], **how))

    before = marks_on(model)
    with apply_policy(model, POLICIES["fastkv"]) as applied:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index, expected in enumerate(want):
        assert len(found[index]) == 3
        assert all(torch.equal(each, expected) for each in found[index])
    assert len(applied.reports) == 9
    assert marks_on(model) == before


def test_a_model_is_not_kept_alive() -> None:
    model = tiny_model("llama", seed=1)
    applied, dead = apply_policy(model, SnapKV(0.3)), weakref.ref(model)
    generate(model)
    del model
    gc.collect()
    assert dead() is None
    assert not applied.is_applied
    applied.remove()


def test_one_policy_at_a_time(model: PreTrainedModel) -> None:
    first = apply_policy(model, POLICIES["snapkv"])
    for policy in (POLICIES["snapkv"], FullContext()):
        with pytest.raises(ValueError, match=r"no policy applied, got one with SnapKV.*remove\(\)"):
            apply_policy(model, policy)
    first.remove()
    with apply_policy(model, FullContext()) as second:
        first.remove()  # of what is no longer applied
        assert second.is_applied
    with pytest.raises(ValueError, match="got one that was removed; call apply_policy again"):
        first.__enter__()


# Errors


def test_a_call_that_fails_leaves_nothing(model: PreTrainedModel) -> None:
    before = marks_on(model)

    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    applied = apply_policy(model, SnapKV(0.3))
    handle = model.model.layers[2].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"), applied:
        generate(model)
    handle.remove()
    assert not applied.is_applied
    assert applied.reports == ()
    assert marks_on(model) == before


def loop(model: Any, input_ids: Tensor, **inputs: Any) -> Tensor:
    return input_ids


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "of a user's own": ({"custom_generate": loop}, "custom_generate must be None unless"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "generation mode must be one of"),
    "no cache": ({"use_cache": False}, "use_cache must be True with a PolicyCache"),
    "static": ({"cache_implementation": "static"}, "cache_implementation must be None .*'static'"),
    "configured": (
        {"generation_config": GenerationConfig(cache_implementation="quantized")},
        "cache_implementation must be None .*'quantized'",
    ),
    "paged": ({"cache_implementation": "paged"}, "continuous batching uses its own cache"),
}


@pytest.mark.parametrize(("how", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_cache_refuses_is_refused(
    model: PreTrainedModel, how: dict[str, Any], message: str
) -> None:
    before = marks_on(model)
    for given in ({}, {CACHE: PolicyCache(SnapKV(0.3))}):
        with (
            apply_policy(model, SnapKV(0.3)) as applied,
            pytest.raises(UnsupportedGenerationError, match=message),
        ):
            model.generate(IDS, **how, **given)
        assert applied.reports == ()
    assert marks_on(model) == before


@pytest.mark.parametrize(
    "setting", [{"use_cache": False}, {"cache_implementation": "static"}], ids=str
)
def test_a_models_own_settings_that_contradict(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]
) -> None:
    ((name, value),) = setting.items()
    monkeypatch.setattr(model.generation_config, name, value)
    with apply_policy(model, SnapKV(0.3)), pytest.raises(UnsupportedGenerationError, match=name):
        generate(model)


def test_continuous_batching_would_ignore_it(model: PreTrainedModel) -> None:
    with (
        apply_policy(model, SnapKV(0.3)),
        pytest.raises(UnsupportedGenerationError, match="or for a model that has a cache attached"),
    ):
        model.generate_batch(IDS.tolist(), max_new_tokens=3)


class OwnGenerate(nn.Module):
    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.generate(*args, **kwargs)


def test_models_that_no_policy_can_be_applied_to(model: PreTrainedModel) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    both = T5ForConditionalGeneration(T5Config(vocab_size=20, **sizes))
    with pytest.raises(UnsupportedModelError):
        apply_policy(both, SnapKV(0.3))
    with pytest.raises(UnsupportedModelError, match="but LlamaModel has none"):
        apply_policy(model.model, SnapKV(0.3))
    with pytest.raises(UnsupportedModelError, match="but OwnGenerate has another one"):
        apply_policy(OwnGenerate(model), SnapKV(0.3))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        apply_policy("model", SnapKV(0.3))  # type: ignore[arg-type]


def test_bad_arguments(model: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="policy must be a CachePolicy"):
        apply_policy(model, SnapKV)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="storage must be a Storage"):
        apply_policy(model, SnapKV(0.3), storage="cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reports must be"):
        apply_policy(model, SnapKV(0.3), reports=-1)
    with pytest.raises(ValueError, match="max_new_tokens"):
        apply_policy(model, SnapKV(0.3), max_new_tokens=10**6)
    with pytest.raises(ValueError, match="tsp_layer|layer"):
        apply_policy(model, FastKV(tsp_layer=40))
