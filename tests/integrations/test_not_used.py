"""A cache that a call would pass by: refused, with the way to use it."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import SnapKV
from tests.integrations.support.conversation import prompt
from tests.integrations.support.reading import marks_on
from tests.reference import tiny_model

POLICY = SnapKV(0.3)
REMEDY = r"model\.generate\(input_ids, attention_mask=mask, cache=cache\)"


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=1)


def test_continuous_batching(model: PreTrainedModel) -> None:
    cache, prompts, before = PolicyCache(POLICY), prompt(60).tolist(), marks_on(model)
    with pytest.raises(UnsupportedGenerationError, match=REMEDY):
        model.generate_batch(prompts, cache=cache, max_new_tokens=3)
    with cache.attached(model):
        with pytest.raises(UnsupportedGenerationError, match="generate_batch must not be"):
            model.generate_batch(prompts, max_new_tokens=3)
        with pytest.raises(UnsupportedGenerationError, match="init_continuous_batching must not"):
            model.init_continuous_batching()
        with (
            pytest.raises(UnsupportedGenerationError, match="init_continuous_batching must not"),
            model.continuous_batching_context_manager(),
        ):
            pass
    with pytest.raises(UnsupportedGenerationError, match=REMEDY):
        model.generate(prompt(60), cache=cache, cache_implementation="paged", max_new_tokens=3)
    assert marks_on(model) == before
    assert cache.get_seq_length() == 0
    model.generate(prompt(60), cache=cache, max_new_tokens=3)
    assert cache.get_seq_length() == 62


def test_continuous_batching_without_a_cache(model: PreTrainedModel) -> None:
    expected = model.generate(prompt(60), max_new_tokens=3, do_sample=False)[0, 60:].tolist()
    (answer,) = model.generate_batch(prompt(60).tolist(), max_new_tokens=3).values()
    assert answer.generated_tokens == expected


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ("call", "^use_cache must be True with a PolicyCache, got False"),
        ("given config", "^use_cache of generation_config must be True"),
        ("generation config", "^use_cache of the model's generation_config"),
        ("config", "^use_cache of the model's config must be True"),
    ],
)
def test_no_cache_wanted(model: PreTrainedModel, of: str, message: str) -> None:
    cache, arguments = PolicyCache(POLICY), dict[str, Any]()
    if of == "call":
        arguments["use_cache"] = False
    elif of == "given config":
        arguments["generation_config"] = GenerationConfig(use_cache=False)
    else:
        (model.config if of == "config" else model.generation_config).use_cache = False
    with pytest.raises(UnsupportedGenerationError, match=message):
        model.generate(prompt(60), cache=cache, max_new_tokens=3, **arguments)
    assert cache.get_seq_length() == 0
    model.generate(prompt(60), cache=cache, max_new_tokens=3, use_cache=True)
    assert cache.get_seq_length() == 62


def test_no_cache_wanted_in_a_loop(model: PreTrainedModel) -> None:
    cache = PolicyCache(POLICY)
    with torch.no_grad(), cache.attached(model):
        with pytest.raises(UnsupportedGenerationError, match="^use_cache must be True"):
            model(prompt(60), cache=cache, use_cache=False)
        model.config.use_cache = False
        with pytest.raises(UnsupportedGenerationError, match="^use_cache of the model's config"):
            model(prompt(60), cache=cache)
        assert cache.get_seq_length() == 0
        model(prompt(60), cache=cache, use_cache=True)
    assert cache.get_seq_length() == 60
