"""Files that earlier versions saved load, and go on to the same tokens as then."""

import pytest
import torch
from transformers import PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache
from tests.tools.saved_files import FOLDER, POLICIES, conversation, exact_model, goes_on, tokens_of

# What version 0.1.0 answered to a second prompt; see `tests.tools.saved_files`.
ANSWERS = {
    "ada_kv": [4, 91, 74, 39, 42, 28, 73, 39, 43, 42, 38, 25, 30, 14, 91, 9, 7, 38, 25, 22],
    "fastkv": [28, 10, 25, 31, 74, 73, 31, 14, 73, 82, 22, 52, 28, 10, 31, 94, 94, 73, 90, 34],
    "h2o": [73, 49, 73, 42, 1, 30, 13, 52, 43, 42, 74, 73, 86, 91, 19, 91, 27, 66, 52, 73],
    "kvzip": [73, 49, 28, 12, 63, 22, 28, 43, 82, 57, 4, 2, 16, 68, 14, 14, 31, 3, 19, 73],
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return exact_model()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of names that files of then have
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_file_of_an_earlier_version(model: PreTrainedModel, name: str) -> None:
    cache = PolicyCache.load(FOLDER / f"{name}.safetensors")
    fresh = PolicyCache(POLICIES[name])
    before = conversation(model, fresh)
    assert cache.policy == POLICIES[name]
    assert cache.seen_lengths == fresh.seen_lengths == (80,)
    assert str(cache.report()) == str(fresh.report())
    assert all(layer.keys.shape[2] < 80 for layer in fresh.layers)
    for saved, made in zip(cache.layers, fresh.layers, strict=True):
        assert torch.equal(saved.positions, made.positions)
        assert torch.allclose(saved.keys, made.keys, atol=1e-4)
        assert torch.allclose(saved.values, made.values, atol=1e-4)
    assert goes_on(model, cache, before) == ANSWERS[name]
    assert goes_on(model, fresh, before) == ANSWERS[name]


def test_what_was_saved_decides_the_answers(model: PreTrainedModel) -> None:
    """Caches of other policies answer otherwise, so that a wrong content would show."""
    assert len(set(map(tuple, ANSWERS.values()))) == len(POLICIES)
    whole = model.generate(tokens_of(2, 60), max_new_tokens=21, do_sample=False)
    ids = torch.cat([whole, tokens_of(3, 12)], dim=1)
    dense = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
    assert dense not in ANSWERS.values()
