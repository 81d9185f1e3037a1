"""Answers in layers of Transformers, in the ways in which `generate` is called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria

from kvpolicy.integrations.transformers import PolicyCache
from tests.integrations.test_lent_answers import (
    POLICIES,
    answer,
    assert_alike,
    begun,
    llama,
    random_tokens,
    with_hooks,
)

__all__ = ["begun", "llama"]  # fixtures


class Raises(StoppingCriteria):
    """A criterion that raises an error after some tokens."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self.left -= 1
        if not self.left:
            raise RuntimeError("stopped")
        return torch.zeros(len(ids), dtype=torch.bool)


def in_inference_mode(model: PreTrainedModel, prompt: Tensor, cache: PolicyCache) -> Any:
    with torch.inference_mode():
        return answer(model, prompt, cache)


def ended_in_one_row(model: PreTrainedModel, prompt: Tensor, cache: PolicyCache) -> Any:
    tokens, _ = answer(model, prompt, PolicyCache(cache.policy))
    return answer(model, prompt, cache, eos_token_id=int(tokens[0, 43]), pad_token_id=0)


def stopped_by_an_error(model: PreTrainedModel, prompt: Tensor, cache: PolicyCache) -> Any:
    """Decode again the token that was forgotten: hooks would have kept it."""
    tokens, _ = answer(model, prompt, PolicyCache(cache.policy))
    with pytest.raises(RuntimeError, match="stopped"):
        answer(model, prompt, cache, stopping_criteria=[Raises(6)])
    logits, seen = [], cache.get_seq_length()
    with torch.no_grad(), cache.attached(model):
        for column in range(seen, 48):
            found = model(tokens[:, column : column + 1], cache=cache)
            logits.append(found.logits[:, -1])
    return tokens, torch.stack(logits[45 - seen :])


def sampled(model: PreTrainedModel, prompt: Tensor, cache: PolicyCache) -> Any:
    torch.manual_seed(0)
    return answer(model, prompt[:1], cache, do_sample=True, num_return_sequences=3)


WAYS: dict[str, Callable[[PreTrainedModel, Tensor, PolicyCache], Any]] = {
    "plain": answer,
    "inference mode": in_inference_mode,
    "ended in one row": ended_in_one_row,
    "stopped by an error": stopped_by_an_error,
    "sampled": sampled,
    "one token": lambda *given: answer(*given, 1),
    "in chunks": lambda *given: answer(*given, prefill_chunk_size=7),
    "hidden states": lambda *given: answer(*given, output_hidden_states=True),
}


CASES = [
    (way, name)
    for way in WAYS
    for name in (POLICIES if way == "plain" else ("snapkv", "adakv", "gemfilter"))
]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_two_turns_are_those_with_hooks(
    llama: PreTrainedModel, way: str, name: str, begun: list[bool]
) -> None:
    found = []
    for hooked in (False, True):
        with with_hooks(hooked):
            cache = PolicyCache(POLICIES[name])
            tokens, logits = WAYS[way](llama, random_tokens(2, 40, seed=2), cache)
            prompt = torch.cat([tokens, random_tokens(len(tokens), 11, seed=3)], dim=1)
            more, later = answer(llama, prompt, cache, 4)
        found.append((cache, more, logits, later))
    (cache, tokens, *logits), (expected, same, *same_logits) = found
    assert begun[0]
    assert way != "plain" or begun == [True, True]
    assert torch.equal(tokens, same)
    for ours, theirs in zip(logits, same_logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert_alike(cache, expected)
    assert not any(module._forward_pre_hooks for module in llama.modules())
