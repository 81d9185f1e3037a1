"""The modes of `generate`: beams, drafts, chunks, and rows that come and go."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import (
    H2O,
    FastKV,
    FullContext,
    GemFilter,
    KeyDiff,
    PyramidInfer,
    SnapKV,
    StreamingLLM,
)
from tests import reference
from tests.integrations.support.conversation import left_padded
from tests.reference import ReferenceState, random_tokens, tiny_model

EVICTING: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "streamingllm": StreamingLLM(0.4),
    "snapkv": SnapKV(0.4),
    "h2o": H2O(0.4),
    "keydiff": KeyDiff(0.4),
}
POLICIES = {
    **EVICTING,
    "fastkv": FastKV(tsp_rate=0.5, retention_rate=0.3),
    "gemfilter": GemFilter(retention_rate=0.4),
    "pyramidinfer": PyramidInfer(min_context=8),
}
NEW = 12

# Before, generate cut the mask of a later turn's chunks as if nothing had been read before them.
CHUNKS_GO_ON = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)


@pytest.fixture(scope="module")
def draft_model() -> PreTrainedModel:
    return tiny_model("llama", seed=2)


# A prompt that repeats itself, so that looking it up proposes something.
IDS = torch.tensor([random_tokens(0, 20) * 3])


def generate(model: PreTrainedModel, cache: Any, ids: Tensor = IDS, **kwargs: Any) -> Any:
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, **kwargs}
    return model.generate(ids, **{CACHE: cache}, **{"do_sample": False, **kwargs})


def continued(ids: Tensor, seed: int = 9) -> Tensor:
    return torch.cat([ids, torch.tensor([random_tokens(seed, 30)])], dim=1)


def assert_same_state(one: PolicyCache, other: PolicyCache) -> None:
    assert one.get_seq_length() == other.get_seq_length()
    for layer, twin in zip(one.layers, other.layers, strict=True):
        assert torch.equal(layer.positions, twin.positions)
        tokens = (layer.positions >= 0).expand(layer.keys.shape[:3])
        assert torch.allclose(layer.keys[tokens], twin.keys[tokens], atol=1e-5)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("drafts", ["looked up", "bad model", "good model"])
def test_drafts_change_nothing(
    model: PreTrainedModel, draft_model: PreTrainedModel, name: str, drafts: str
) -> None:
    """The first forward brings drafts along with the prompt; they are not the prompt's end."""
    how: dict[str, Any] = {
        "looked up": {"prompt_lookup_num_tokens": 4},
        "bad model": {"assistant_model": draft_model},
        "good model": {"assistant_model": model},
    }[drafts]
    plain, assisted = PolicyCache(POLICIES[name]), PolicyCache(POLICIES[name])
    first = generate(model, plain)
    assert torch.equal(generate(model, assisted, **how), first)
    second = generate(model, plain, continued(first))
    assert torch.equal(generate(model, assisted, continued(first), **how), second)
    assert_same_state(plain, assisted)


@pytest.mark.parametrize("policy", [POLICIES["snapkv"], POLICIES["fastkv"]], ids=["kv", "tsp"])
def test_drafts_with_scores_and_hidden_states(model: PreTrainedModel, policy: CachePolicy) -> None:
    kwargs = {"output_logits": True, "return_dict_in_generate": True}
    plain = generate(model, PolicyCache(policy), **kwargs)
    assisted = generate(model, PolicyCache(policy), prompt_lookup_num_tokens=4, **kwargs)
    assert torch.allclose(torch.stack(plain.logits), torch.stack(assisted.logits), atol=1e-4)


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}])
@pytest.mark.parametrize("padded", [False, True])
def test_beams_of_a_policy_that_keeps_everything(
    model: PreTrainedModel, how: dict[str, Any], padded: bool
) -> None:
    ids, mask = left_padded([random_tokens(0, 50), random_tokens(1, 31)][: 1 + padded])
    expected = generate(model, DynamicCache(), ids, attention_mask=mask, **how)
    found = generate(model, PolicyCache(FullContext()), ids, attention_mask=mask, **how)
    assert torch.equal(found, expected)


METHODS = {
    "snapkv": (SnapKV(0.4), reference.SnapKV(0.4)),
    "fastkv": (FastKV(tsp_rate=0.5, retention_rate=0.3), reference.FastKV(0.3, tsp_rate=0.5)),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("sampled", [False, True])
def test_beams_score_as_the_reference_scores_them(
    model: PreTrainedModel, name: str, sampled: bool
) -> None:
    """Every beam that is returned has followed its own tokens only, through every reordering."""
    policy, method = METHODS[name]
    torch.manual_seed(0)
    output = generate(
        model,
        PolicyCache(policy),
        num_beams=4,
        num_return_sequences=4,
        length_penalty=0.0,
        do_sample=sampled,
        output_scores=True,
        return_dict_in_generate=True,
    )
    beams = output.beam_indices
    assert any(sorted(set(step)) != [0, 1, 2, 3] for step in beams.T.tolist())
    for sequence, score in zip(output.sequences.tolist(), output.sequences_scores, strict=True):
        state = ReferenceState(model, method)
        said = sequence[60:]
        turn = state.turn(IDS[0].tolist(), NEW - 1, forced=said[:-1])
        logits = torch.cat([turn.prefill_logits[None], turn.decode_logits])
        total = logits.log_softmax(-1)[torch.arange(NEW), said].sum()
        assert abs(float(total) - float(score)) < 1e-3


def test_a_streamer_gets_every_token(model: PreTrainedModel) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    streamer = Recorder()
    output = generate(model, PolicyCache(POLICIES["fastkv"]), streamer=streamer)
    assert streamer.tokens == [*output[0].tolist(), -1]


def test_hidden_states_in_generate_are_those_of_the_tokens_that_went_on(
    model: PreTrainedModel,
) -> None:
    output = generate(
        model,
        PolicyCache(FastKV(tsp_layer=1, tsp_rate=0.5, retention_rate=0.3)),
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_scores=True,
    )
    assert [state.shape[1] for state in output.hidden_states[0]] == [60, 60, 30, 30, 30]
    assert [state.shape[1] for state in output.hidden_states[1]] == [1] * 5
    assert len(output.scores) == NEW


@torch.no_grad()
def test_drafts_behind_a_prompt_in_a_loop_by_hand(model: PreTrainedModel) -> None:
    """What is given there is new, with a mask or without."""
    logits = []
    for _ in range(2):
        cache = PolicyCache(POLICIES["snapkv"])
        with cache.attached(model):
            model(IDS[:, :5], cache=cache)
            cache.start_turn(prompt_len=20)
            if not logits:
                logits.append(model(IDS[:, :25], cache=cache).logits)
            else:
                model(IDS[:, :20], cache=cache)
                logits.append(model(IDS[:, 20:25], cache=cache).logits)
        assert cache.get_seq_length() == 30
    assert torch.allclose(logits[0][:, -5:], logits[1], atol=1e-5)
