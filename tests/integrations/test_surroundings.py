"""What people put around models: adapters, pipelines, offloading, generation of their own."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, pipeline

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache, apply_policy
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import FastKV, FullContext, SnapKV
from tests.integrations.state.test_fingerprint import by_quanto, by_torchao
from tests.integrations.support.conversation import prompt
from tests.integrations.support.reading import marks_on, read
from tests.needle import NeedleTask, load_model, load_tokenizer
from tests.reference import tiny_model

POLICIES: dict[str, CachePolicy] = {
    "snapkv": SnapKV(0.3),
    "fastkv": FastKV(tsp_rate=0.5, retention_rate=0.3),
}


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=1)


def generate(model: Any, cache: Any, ids: Tensor, **how: Any) -> Tensor:
    """New tokens of a greedy answer."""
    how = {"max_new_tokens": 7, "do_sample": False, **how}
    output: Tensor = model.generate(input_ids=ids, cache=cache, **how)
    return output[:, -how["max_new_tokens"] :]


def same(one: PolicyCache, other: PolicyCache) -> bool:
    pairs = zip(one.layers, other.layers, strict=True)
    return all(torch.equal(a.positions, b.positions) for a, b in pairs)


# PEFT


def adapted(model: PreTrainedModel, kind: str, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
        return peft.get_peft_model(model, config).eval()


def with_lora(model: PreTrainedModel) -> Any:
    names = ["q_proj", "k_proj", "v_proj", "down_proj"]
    return adapted(model, "LoraConfig", r=4, init_lora_weights=False, target_modules=names)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", POLICIES)
def test_lora_gives_what_the_merged_model_gives(model: PreTrainedModel, name: str) -> None:
    own, merged = copy.deepcopy(model), with_lora(copy.deepcopy(model)).merge_and_unload()
    wrapped = with_lora(model)
    expected, cache, plain = (PolicyCache(POLICIES[name]) for _ in range(3))
    ids = prompt(60)
    for turn in range(2):
        want = generate(merged, expected, ids)
        assert torch.equal(generate(wrapped, cache, ids), want)
        assert same(cache, expected)
        if not turn:
            assert not torch.equal(generate(own, plain, ids), want)
        ids = torch.cat([ids, want, prompt(20, seed=4)], dim=1)
    by_hand, logits = read(wrapped, POLICIES[name], prompt(60))
    assert logits.shape[1] == (60 if name == "snapkv" else 30)
    assert by_hand.get_seq_length() == 60


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_cache_of_a_model_with_lora_is_not_one_of_the_model_without(
    model: PreTrainedModel, tmp_path: Any
) -> None:
    own, wrapped = copy.deepcopy(model), with_lora(model)
    cache = PolicyCache(SnapKV(0.3))
    generate(wrapped, cache, prompt(60))
    cache.save(tmp_path / "cache")
    loaded = PolicyCache.load(tmp_path / "cache")
    with (
        pytest.raises(ValueError, match=r"only the o.* has a parameter .*base_layer"),
        loaded.attached(own),
    ):
        pass
    with loaded.attached(wrapped):
        pass


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_prefix_tuning_is_refused_by_name(model: PreTrainedModel) -> None:
    wrapped = adapted(model, "PrefixTuningConfig", num_virtual_tokens=5)
    before, cache = marks_on(model), PolicyCache(SnapKV(0.3))
    message = "peft_type of the model's adapter must not be PREFIX_TUNING"
    with pytest.raises(UnsupportedModelError, match=message):
        generate(wrapped, cache, prompt(60))
    with pytest.raises(UnsupportedModelError, match=message), cache.attached(wrapped):
        pass
    with pytest.raises(UnsupportedModelError, match=message):
        apply_policy(wrapped, SnapKV(0.3))
    # What PEFT has set for its own `generate`.
    del model.prepare_inputs_for_generation, model.model.generation_config
    assert marks_on(model) == before
    assert cache.get_seq_length() == 0


def finds_the_cache(wrapped: Any) -> bool:
    """Whether PEFT knows that a decoded token follows others: its virtual tokens come once."""
    lengths: list[int] = []
    handle = (
        wrapped.get_base_model()
        .model.layers[0]
        .register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    )
    try:
        generate(wrapped, None, prompt(60), max_new_tokens=3)
    finally:
        handle.remove()
    return lengths == [65, 1, 1]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_prompt_tuning(model: PreTrainedModel) -> None:
    wrapped = adapted(model, "PromptTuningConfig", num_virtual_tokens=5)
    if not finds_the_cache(wrapped):
        with pytest.raises(UnsupportedModelError, match="must not be PROMPT_TUNING with these"):
            generate(wrapped, PolicyCache(FullContext()), prompt(60))
        return
    assert torch.equal(
        generate(wrapped, PolicyCache(FullContext()), prompt(60)),
        generate(wrapped, None, prompt(60)),
    )
    cache, by_hand = PolicyCache(SnapKV(0.3)), PolicyCache(SnapKV(0.3))
    said = generate(wrapped, cache, prompt(60))
    embeds = torch.cat([wrapped.get_prompt(1), model.get_input_embeddings()(prompt(60))], dim=1)
    base = wrapped.get_base_model()
    with torch.no_grad(), by_hand.attached(base):
        first = base(inputs_embeds=embeds, cache=by_hand).logits[:, -1].argmax(-1)
    assert by_hand.get_seq_length() == 65
    assert first == said[0, 0]
    assert [layer.kept_len for layer in cache.layers] == [int(65 * 0.3) + 6] * 4
    # Virtual tokens have columns of their own: a conversation that leaves them out is another one.
    whole = torch.cat([prompt(60), said, prompt(20, seed=4)], dim=1)
    with pytest.raises(ValueError, match="input_ids must begin with the tokens that the cache has"):
        generate(wrapped, cache, whole)


class Deaf(nn.Module):
    """Gives the model inside another cache, as some wrappers do."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.inner = model
        self.config = model.config

    def get_decoder(self) -> nn.Module:
        decoder: nn.Module = self.inner.get_decoder()
        return decoder

    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Any:
        return self.inner(input_ids)


def test_a_wrapper_that_keeps_the_cache_to_itself(model: PreTrainedModel) -> None:
    cache, before = PolicyCache(SnapKV(0.3)), marks_on(model)
    wrapped = Deaf(model)
    with torch.no_grad(), cache.attached(wrapped):
        with pytest.raises(UnsupportedModelError, match="Deaf was called with the cache, but did"):
            wrapped(prompt(60), cache=cache)
        model(prompt(60), cache=cache)
    assert cache.get_seq_length() == 60
    assert marks_on(model) == before


# Quantised weights


@pytest.mark.parametrize("quantize", [by_quanto, by_torchao])
@pytest.mark.parametrize("name", POLICIES)
def test_quantised_weights(model: PreTrainedModel, tmp_path: Any, quantize: Any, name: str) -> None:
    quantize(model)
    ids, full = prompt(60), PolicyCache(FullContext())
    assert torch.equal(generate(model, full, ids), generate(model, None, ids))
    cache = PolicyCache(POLICIES[name])
    said = generate(model, cache, ids)
    cache.save(tmp_path / "cache")
    whole = torch.cat([ids, said, prompt(20, seed=4)], dim=1)
    loaded = PolicyCache.load(tmp_path / "cache")
    assert torch.equal(generate(model, loaded, whole), generate(model, cache, whole))
    assert same(loaded, cache)


# Generation


@pytest.fixture(scope="module")
def assistant() -> Any:
    model, tokenizer = load_model(), load_tokenizer()
    return pipeline("text-generation", model=model, tokenizer=tokenizer)


def test_a_pipeline(assistant: Any) -> None:
    task = NeedleTask(context_len=256)
    texts = [assistant.tokenizer.decode(each.input_ids) for each in task.prompts(3)]
    how = {"max_new_tokens": 3, "return_full_text": False}
    for text, each in zip(texts, task.prompts(3), strict=True):
        cache, alone = PolicyCache(SnapKV(0.3)), PolicyCache(SnapKV(0.3))
        said = assistant(text, cache=cache, **how)[0]["generated_text"]
        ids = torch.tensor([each.input_ids])
        want = generate(assistant.model, alone, ids, max_new_tokens=3)[0].tolist()
        assert assistant.tokenizer(said)["input_ids"] == want
        assert [layer.kept_len for layer in cache.layers] == [int(256 * 0.3) + 2] * 6
    # One after the other, the second prompt would be read as the first one's next turn.
    with pytest.raises(ValueError, match="input_ids must continue the 258 tokens"):
        assistant(texts, cache=PolicyCache(SnapKV(0.3)), **how)
    cache = PolicyCache(SnapKV(0.3))
    batch = assistant(texts, cache=cache, batch_size=3, **how)
    alone = [assistant(each, cache=PolicyCache(SnapKV(0.3)), **how) for each in texts]
    assert batch == alone
    assert cache.batch_size == 3


def greedy(model: Any, input_ids: Tensor, generation_config: Any, **inputs: Any) -> Tensor:
    """Generation of a user's own: a bare loop."""
    cache, mask = inputs[CACHE], inputs.get("attention_mask")
    mask = (
        torch.ones_like(input_ids) if mask is None else mask
    )  # as it is where there is no padding
    new = input_ids[:, cache.get_seq_length() :]
    for _ in range(generation_config.max_new_tokens):
        logits = model(new, attention_mask=mask, cache=cache).logits
        new = logits[:, -1:].argmax(dim=-1)
        input_ids = torch.cat([input_ids, new], dim=1)
        mask = torch.cat([mask, torch.ones_like(new)], dim=1)
    return input_ids


@pytest.mark.parametrize("fixed", [None, 16])
@pytest.mark.parametrize("name", POLICIES)
def test_generation_of_a_users_own(model: PreTrainedModel, name: str, fixed: int | None) -> None:
    cache = PolicyCache(POLICIES[name], max_new_tokens=fixed)
    with pytest.raises(UnsupportedGenerationError, match="call generate inside of `with cache.att"):
        generate(model, cache, prompt(60), custom_generate=greedy)
    expected, ids = PolicyCache(POLICIES[name]), prompt(60)
    for _ in range(2):
        with cache.attached(model):
            got = generate(model, cache, ids, custom_generate=greedy)
        assert torch.equal(got, generate(model, expected, ids))
        assert same(cache, expected)
        ids = torch.cat([ids, got, prompt(20, seed=4)], dim=1)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Packages may warn on import, which is not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("peft", "torchao", "torchao.quantization", "optimum.quanto"):
            try:
                __import__(name)
            except ImportError:
                continue
