"""Decoders that want as many hidden states behind their layers as went in: they are filled up."""

from typing import Any

import pytest
import torch

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.checking import check_model
from kvpolicy.policies import FastKV, GemFilter, PyramidInfer
from tests.integrations.hybrids.models import TOLERANCE, apart, generate, hybrid, tokens
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.model.builds.dense import dense_logits
from tests.integrations.support.conversation import left_padded

# One that views its output as its input's shape, one whose layers look at what came before others.
NAMES = [name for name in ("gpt2", "inkling2_text") if name in builds()]
ROWS = [tokens(0, 47), tokens(1, 31)]
POLICY = FastKV(tsp_layer=1, tsp_rate=0.5, retention_rate=0.3, window_size=4)


def test_several_drops() -> None:
    """As of a model whose hidden states are cut, each layer's tokens are those that went on."""
    model, (ids, mask) = hybrid("gpt2"), left_padded(ROWS)
    cache = PolicyCache(PyramidInfer(recent_rate=0.2, decay_ratio=0.5, min_context=4))
    said, found = generate(model, cache, ids, mask)
    assert len(cache.propagated) > 1
    alone = [PolicyCache(cache.policy) for _ in ROWS]
    for row, (ids_of_row, own) in enumerate(zip(ROWS, alone, strict=True)):
        answer, logits = generate(model, own, torch.tensor([ids_of_row]))
        assert torch.equal(answer[0, len(ids_of_row) :], said[row, 47:])
        assert apart(found[row], logits[0]) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_tokens_that_went_on(name: str) -> None:
    model, (ids, mask) = hybrid(name), left_padded(ROWS)
    cache = PolicyCache(POLICY)
    with torch.no_grad(), cache.attached(model):
        output: Any = model(ids, attention_mask=mask, cache=cache)
        head = model.get_output_embeddings()
        again = PolicyCache(POLICY)
        with again.attached(model):
            states: Any = model(ids, attention_mask=mask, cache=again, output_hidden_states=True)
    (passed,) = cache.propagated.values()
    assert output.logits.shape[:2] == passed.shape == (2, 23)
    lengths = [each.shape[1] for each in states.hidden_states]
    assert lengths == [47, 47, 23, 23, 23]
    valid = passed >= 0
    assert apart(states.logits[valid], output.logits[valid]) < TOLERANCE
    if name == "gpt2":  # elsewhere the head caps what it says
        with torch.no_grad():
            logits = head(states.hidden_states[-1])
        assert apart(logits[valid], output.logits[valid]) < TOLERANCE


def test_a_restart() -> None:
    model, cache = hybrid("gpt2"), PolicyCache(GemFilter(retention_rate=0.4))
    said, found = generate(model, cache, torch.tensor(ROWS[:1]))
    (chosen,) = cache.propagated.values()
    alone = [ROWS[0][place] for place in chosen[0].tolist()]
    answer = said[0, 47:-1].tolist()
    want = dense_logits(model, alone + answer, len(alone))[len(alone) - 1 :]
    assert apart(found[0], want) < TOLERANCE


@pytest.mark.parametrize(("name", "refills"), [*((name, True) for name in NAMES), ("llama", False)])
def test_the_self_check_finds_who_needs_it(name: str, refills: bool) -> None:
    verdict = check_model(hybrid(name)).verdict
    assert verdict is not None
    assert verdict.quirks.refills is refills
