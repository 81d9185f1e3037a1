"""The judge judges: a dozen decoders of unlike kinds, and mistakes that it must notice.

`make families` judges every decoder of the installed Transformers.
"""

from typing import Any

import pytest
import torch

from kvpolicy.policies import SnapKV
from tests.integrations.hybrids.models import FAMILIES as HYBRIDS
from tests.integrations.hybrids.models import hybrid
from tests.integrations.model.builds import judge
from tests.integrations.model.builds.catalogue import NOT_BUILT, builds
from tests.integrations.model.builds.dense import Seen
from tests.integrations.model.builds.judge import Judge
from tests.integrations.model.builds.sizes import LAYERS

BUILDS = builds()
RIGHT = (
    "cohere2",  # a parallel block, windows in some layers
    "deepseek_v3",  # latent attention
    "deepseek_v32",  # an indexer
    "gemma2",  # capped scores
    "gpt_neox",  # queries, keys and values from one projection
    "gpt_oss",  # sinks, experts
    "hy_v4",  # slots picked by another layer's indexer
    "jetmoe",  # keys repeated behind the cache
    "llama4_text_mixed",  # chunks
    "llama_multi_query",
    "mllama",  # cross attention
    "llava",  # a decoder inside of a model of images
    "mistral_sliding",  # windows in all layers
    "opt",  # learned positions
    "qwen2_vl",  # positions of three axes
    "qwen3_moe",
    *HYBRIDS,
    *("bert", "roberta", "xlm-roberta-xl", "electra"),  # layers in a module that reads no tokens
    *("gemma3n_text", "gemma4_text_shared"),  # keys of earlier layers
    *("gpt2", "inkling2_text"),  # as many hidden states behind layers as went in
)
# Not to be applied to, or right: never wrong, and never an exception of another kind.
SAFE = ("falcon_alibi", "jamba", "llama4_text", "mamba")


@pytest.mark.parametrize("name", sorted({*RIGHT} & {*BUILDS}))
def test_the_library_is_right(name: str) -> None:
    verdict = Judge(name, hybrid(name))()
    assert verdict.outcome == "right", verdict


@pytest.mark.parametrize("name", SAFE)
def test_what_is_refused_is_refused_before_anything_is_computed(name: str) -> None:
    verdict = Judge(name, BUILDS[name].model())()
    assert verdict.outcome in ("refused", "right"), verdict


@pytest.mark.parametrize("layer", range(LAYERS))
def test_one_key_too_few_in_one_layer_is_noticed(
    layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference then sees one key less than the library kept."""
    honest = judge.seen_by

    def lacking(*args: Any) -> list[Seen]:
        seen = honest(*args)
        keys = seen[layer].keys
        assert keys is not None
        first = int(keys[0, -1].nonzero()[0])
        keys[:, args[2] :, first] = False
        return seen

    monkeypatch.setattr(judge, "seen_by", lacking)
    for name in ("full_context", "fastkv", "snapkv"):
        monkeypatch.setitem(judge.POLICIES, name, judge.POLICIES["streamingllm"])
    verdict = Judge("llama", BUILDS["llama"].model())()
    assert verdict.outcome == "wrong", verdict


def test_keeping_everything_is_not_taken_for_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(judge.POLICIES, "snapkv", SnapKV(retention_rate=1.0))
    verdict = Judge("llama", BUILDS["llama"].model())()
    assert verdict.policies["snapkv single"] == "wrong: layers keep [47, 47, 47, 47] tokens of 47"


def test_the_catalogue_holds_every_type() -> None:
    from transformers.models.auto import modeling_auto as auto

    types = {
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    assert types == {each.model_type for each in BUILDS.values()} | (set(NOT_BUILT) & types)
    assert not set(NOT_BUILT) & set(BUILDS)


@pytest.mark.parametrize("name", ["llama", "qwen3_vl"])
def test_a_build_is_its_seed(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (BUILDS[name].model(seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
