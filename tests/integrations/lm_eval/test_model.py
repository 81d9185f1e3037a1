"""The model type inside the real harness: equal to its own where a policy keeps everything."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel

from kvpolicy.integrations.lm_eval import PolicyLM
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import SnapKV
from tests.integrations.lm_eval.conftest import Evaluate
from tests.integrations.lm_eval.support import char_tokenizer, documents, local_task
from tests.reference import tiny_model

KINDS = ("generate_until", "multiple_choice")
EVICTS = {"policy": "snapkv", "retention_rate": 0.2, "window_size": 4}
DROPS = {"policy": "fastkv", "retention_rate": 0.2, "tsp_rate": 0.4, "window_size": 4}


def answers(samples: list[dict[str, Any]]) -> list[Any]:
    """Texts, or log-likelihoods and whether they are greedy."""
    found = []
    for sample in samples:
        for response in sample["resps"]:
            text = response[0]
            found.append(text if isinstance(text, str) else (float(text[0]), str(text[1])))
    return found


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, str):
            assert one == other
        else:
            assert one[0] == pytest.approx(other[0], abs=1e-4)
            assert one[1] == other[1]


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("kind", KINDS)
def test_keeping_everything_is_the_harness_s_own_model(
    evaluate: Evaluate, tmp_path: Path, kind: str, chat: bool
) -> None:
    task = local_task(tmp_path, kind, documents())
    wanted = answers(evaluate(task, "hf", chat=chat))
    for batch_size in (1, 3):
        found = answers(evaluate(task, "kvpolicy", batch_size=batch_size, chat=chat))
        assert_same(found, wanted)


@pytest.mark.parametrize("policy", [EVICTS, DROPS], ids=["evicts", "drops"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_shows_and_batches_agree(
    evaluate: Evaluate, tmp_path: Path, kind: str, policy: dict[str, Any]
) -> None:
    task = local_task(tmp_path, kind, documents())
    one = answers(evaluate(task, "kvpolicy", **policy))
    assert_same(answers(evaluate(task, "kvpolicy", batch_size=3, **policy)), one)
    full = answers(evaluate(task, "hf"))
    if kind == "generate_until":
        assert one != full
    else:
        assert max(abs(a[0] - b[0]) for a, b in zip(one, full, strict=True)) > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_long_contexts_are_cut_as_the_harness_cuts_them(
    evaluate: Evaluate, tmp_path: Path, kind: str
) -> None:
    task = local_task(tmp_path, kind, documents())
    wanted = answers(evaluate(task, "hf", max_length=40))
    assert wanted != answers(evaluate(task, "hf"))
    assert_same(answers(evaluate(task, "kvpolicy", max_length=40, batch_size=3)), wanted)


def test_empty_contexts(evaluate: Evaluate, tmp_path: Path) -> None:
    docs = [{**doc, "context": "", "question": ""} for doc in documents(2)] + documents(2)
    task = local_task(tmp_path, "multiple_choice", docs)
    wanted = answers(evaluate(task, "hf"))
    assert_same(answers(evaluate(task, "kvpolicy", batch_size=3)), wanted)


def test_rolling_texts_need_a_policy_that_keeps_everything(
    evaluate: Evaluate, tmp_path: Path
) -> None:
    task = local_task(tmp_path, "loglikelihood_rolling", documents(2))
    assert answers([{"resps": [[(0.0, "")]]}]) == [(0.0, "")]
    wanted = [sample["resps"] for sample in evaluate(task, "hf", max_length=30)]
    found = [sample["resps"] for sample in evaluate(task, "kvpolicy", max_length=30)]
    assert found == wanted
    with pytest.raises(ValueError, match="loglikelihood_rolling needs a policy that keeps every"):
        evaluate(task, "kvpolicy", **EVICTS)


@torch.no_grad()
def test_a_choice_s_score_is_that_of_docs_scoring(evaluate: Evaluate, tmp_path: Path) -> None:
    """Token by token from a cache that has read all of the context but its last token."""
    docs = documents(2)
    task = local_task(tmp_path, "multiple_choice", docs)
    found = answers(evaluate(task, "kvpolicy", batch_size=3, **EVICTS))
    model, tokenizer = tiny_model("llama", seed=1), char_tokenizer()
    wanted = []
    for doc in docs:
        context = tokenizer(doc["context"] + doc["question"], return_tensors="pt").input_ids
        for choice in doc["choices"]:
            ids = tokenizer(choice, return_tensors="pt").input_ids
            wanted.append(decoded(model, context, ids))
    assert [score for score, _ in found] == pytest.approx(wanted, abs=1e-4)


def decoded(model: PreTrainedModel, context: torch.Tensor, scored: torch.Tensor) -> float:
    cache, total = PolicyCache(SnapKV(0.2, window_size=4)), 0.0
    with cache.attached(model):
        model(context[:, :-1], cache=cache)
        last = context[:, -1:]
        for token in scored[0]:
            likely = log_softmax(model(last, cache=cache).logits[0, -1], dim=-1)
            total += float(likely[token])
            last = token.view(1, 1)
    return total


def test_compositions_and_policies_as_objects(folder: Path) -> None:
    composed = PolicyLM(str(folder), scorer="last_query", retention_rate=0.3, device="cpu")
    assert str(composed.policy.scorer) == "LastQueryScorer()"
    assert composed.policy.selector.budget.rate == 0.3
    told = PolicyLM(folder, selector="sink_and_recent:num_sinks=2", device="cpu")
    assert told.policy.selector.num_sinks == 2
    model = tiny_model("llama", seed=1)
    given = PolicyLM(model, tokenizer=char_tokenizer(), policy=SnapKV(0.4), batch_size=2)
    assert given.policy == SnapKV(0.4)
    assert given.model is model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "nothing"}, "no policy is named 'nothing'"),
        ({"policy": "full_context", "retention_rate": 0.1}, "retention_rate must be a parameter"),
        ({"policy": "snapkv", "scorer": "last_query"}, "policy must be None if parts"),
        ({"scorer": "nothing"}, "no scorer is named 'nothing'"),
        ({"question": "before"}, "question must be one of with, later, got 'before'"),
        ({"batch_size": "auto"}, "batch_size must be an int, got auto"),
        ({"backend": "seq2seq"}, "backend must be causal"),
        ({"retention_rat": 0.1}, "retention_rat must be an argument of the policy or of HFLM"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLM(tiny_model("llama", seed=1), tokenizer=char_tokenizer(), **arguments)
