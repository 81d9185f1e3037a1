"""Both names of the cache argument, on every version; one file alone knows Transformers' names."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, pipeline

from kvpolicy.integrations.transformers import PolicyCache, ReadDocument, apply_policy, surface
from kvpolicy.integrations.transformers.surface import CACHE, CACHE_NAMES, cache_name
from kvpolicy.policies import FastKV
from tests.integrations.lm_eval.support import char_tokenizer
from tests.integrations.support.reading import marks_on
from tests.integrations.test_surroundings import with_lora
from tests.integrations.vision.rows import model_of
from tests.integrations.vision.test_chunks import inputs_of
from tests.reference import random_tokens, tiny_model

ROOT = Path(__file__).parents[2]
NAMES = ("cache", "past_key_values")
IDS = torch.tensor([random_tokens(0, 60)])
HOW: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
POLICY = FastKV(tsp_rate=0.5, retention_rate=0.3)
TEXT = "it was a dark night, and the rain fell in torrents; the street lamps were dim."


@pytest.fixture(autouse=True)
def _no_warning_in_the_log(caplog: pytest.LogCaptureFixture) -> Any:
    """Transformers logs some warnings of old names, each once; pytest raises the others."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
    assert "past_key_values" not in caplog.text


def generated(model: Any, name: str, **how: Any) -> Tensor:
    output: Tensor = model.generate(IDS, **{name: PolicyCache(POLICY), **HOW, **how})
    return output


def read_by_hand(model: Any, name: str, **how: Any) -> Tensor:
    """Logits of a prompt, a decoded token and a second turn."""
    cache = PolicyCache(POLICY)
    with torch.no_grad(), cache.attached(model):
        found = [model(IDS, **{name: cache}, **how).logits[:, -1:]]
        found += [model(IDS[:, :1], **{name: cache}, **how).logits]
        cache.start_turn()
        found += [model(IDS[:, 3:40], **{name: cache}, **how).logits[:, -1:]]
    return torch.cat(found, dim=1)


def in_a_pipeline(model: Any, name: str) -> Any:
    pipe = pipeline("text-generation", model=model, tokenizer=char_tokenizer())
    return pipe(TEXT, **{name: PolicyCache(POLICY)}, **HOW)[0]["generated_text"]


def with_drafts(model: Any, name: str) -> Tensor:
    return generated(model, name, prompt_lookup_num_tokens=3)


def with_an_assistant(model: Any, name: str) -> Tensor:
    return generated(model, name, assistant_model=tiny_model("llama", seed=2))


def beside_an_applied_policy(model: Any, name: str) -> Tensor:
    with apply_policy(model, FastKV(tsp_rate=0.9, retention_rate=0.9)) as applied:
        output = generated(model, name)
        assert not applied.reports
    return output


def under_peft(model: Any, name: str) -> Tensor:
    wrapped = with_lora(tiny_model("llama", seed=1))
    return torch.cat([read_by_hand(wrapped, name), read_by_hand(wrapped, name, labels=None)])


WAYS: dict[str, Callable[[Any, str], Any]] = {
    "generate": generated,
    "a loop by hand": read_by_hand,
    "a pipeline": in_a_pipeline,
    "drafts": with_drafts,
    "an assistant": with_an_assistant,
    "an applied policy": beside_an_applied_policy,
    "PEFT": under_peft,
}


@pytest.mark.filterwarnings("ignore:.*generation_config", "ignore:.*gradient_checkpointing")
@pytest.mark.parametrize("way", WAYS)
def test_both_names_give_the_same_without_a_warning(model: PreTrainedModel, way: str) -> None:
    before = marks_on(model)
    one, other = (WAYS[way](model, name) for name in NAMES)
    assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert marks_on(model) == before


@pytest.mark.parametrize("way", ["generate", "a loop by hand"])
def test_the_policy_acts_under_either_name(model: PreTrainedModel, way: str) -> None:
    plain = model.generate(IDS, **HOW) if way == "generate" else None
    for name in NAMES:
        cache = PolicyCache(POLICY)
        if way == "generate":
            said = model.generate(IDS, **{name: cache}, **HOW)
            assert plain is not None
            assert not torch.equal(said, plain)
        else:
            with torch.no_grad(), cache.attached(model):
                model(IDS, **{name: cache})
        assert cache.report().total.kept < 25
        assert cache.propagated


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_images_takes_both_names(name: str) -> None:
    """Between such a model and its decoder stands another module."""
    model, cache = model_of("llava"), PolicyCache(POLICY)
    with torch.no_grad(), cache.attached(model):
        model(**inputs_of("llava", (0,)), **{name: cache})
    assert cache.propagated


class OldNames(nn.Module):
    """A model as of the Hub, whose code names the cache as before Transformers 5.24."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.config = model, model.config

    def get_decoder(self) -> Any:
        return self.inner.get_decoder()

    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Any:
        return self.inner(input_ids, **{CACHE: past_key_values})


def test_a_models_own_name_is_used_whatever_the_version(model: PreTrainedModel) -> None:
    wrapped = OldNames(model)
    assert cache_name(type(wrapped).forward) == "past_key_values"
    want = read_by_hand(model, CACHE)
    for name in NAMES:
        assert torch.equal(read_by_hand(wrapped, name), want)


def test_documents_do_not_warn(model: PreTrainedModel) -> None:
    document = ReadDocument(model, char_tokenizer(), TEXT, POLICY)
    assert len(document.answer([" who?"], max_new_tokens=3)) == 1


def test_two_caches_in_one_call(model: PreTrainedModel) -> None:
    given = {"cache": PolicyCache(POLICY), "past_key_values": DynamicCache()}
    with pytest.raises(ValueError, match=f"two names of one argument.* pass {CACHE} only"):
        model.generate(IDS, **given, **HOW)
    cache = PolicyCache(POLICY)
    said = model.generate(IDS, cache=cache, past_key_values=cache, **HOW)
    assert torch.equal(said, generated(model, CACHE))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_cache_is_refused_under_either_name(model: PreTrainedModel, name: str) -> None:
    with pytest.raises(TypeError, match=r"must be given a cache, got the policy FastKV"):
        model.generate(IDS, **{name: POLICY}, **HOW)
    with pytest.raises(TypeError, match=f"{CACHE} must be a cache, got the class PolicyCache"):
        model.generate(IDS, **{name: PolicyCache}, **HOW)


# What only `surface.py` may say: names of the cache argument, private attributes and globals, and
# modules below Transformers' top level. Its logging is public.
STRAYS = re.compile(
    r"past_key_values|cache_params|_attn_implementation\b|ALL_ATTENTION_FUNCTIONS"
    r"|\beager_attention_forward|(from|import) transformers\.(?!utils import logging)"
)


def strays(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if STRAYS.search(line)]


def test_no_other_file_names_what_the_surface_names() -> None:
    folders = (ROOT / name for name in ("kvpolicy", "policies", "integrations", "evaluation"))
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert len(files) > 200
    known = Path(surface.__file__).name
    found = {str(file): strays(file.read_text()) for file in files if file.name != known}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_search_for_strays_finds_them() -> None:
    assert strays("from transformers.cache_utils import CacheLayerMixin")
    assert strays("    import transformers.masking_utils ")
    assert strays('kwargs.get("past_key_values")')
    assert strays("config._attn_implementation = 'eager'")
    assert not strays("from transformers import DynamicCache")
    assert not strays("from kvpolicy.integrations.transformers.state.layer import PolicyLayer")


def test_the_installed_version_is_asked_for_its_name() -> None:
    assert CACHE in CACHE_NAMES
    assert cache_name(type(tiny_model("llama", seed=1)).forward) == CACHE
