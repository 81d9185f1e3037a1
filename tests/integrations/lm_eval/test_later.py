"""Questions that are asked after the policy has chosen, and where prompts are split."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from torch import Tensor

from kvpolicy.integrations.lm_eval import PolicyLM, register_splitter
from kvpolicy.integrations.lm_eval.splitters import document_end
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import SnapKV
from kvpolicy.policy import CachePolicy
from tests.integrations.lm_eval.conftest import Evaluate
from tests.integrations.lm_eval.support import char_tokenizer, documents, local_task
from tests.integrations.lm_eval.test_model import DROPS, EVICTS, KINDS, answers, assert_same
from tests.reference import tiny_model

POLICY = SnapKV(0.2, window_size=4)
BOUNDED = {
    "policy": SnapKV(0.4, window_size=4, decoding=SnapKV(window_size=4).decoding_rule(14, every=5))
}


@pytest.fixture(autouse=True, scope="module")
def _splitters() -> None:
    for kind in KINDS:
        register_splitter(f"local_{kind}", lambda doc, prompt: prompt.rindex(doc["question"]))


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_eviction_it_makes_no_difference(
    evaluate: Evaluate, tmp_path: Path, kind: str, chat: bool
) -> None:
    task = local_task(tmp_path, kind, documents())
    wanted = answers(evaluate(task, "hf", chat=chat))
    found = evaluate(task, "kvpolicy", question="later", batch_size=3, chat=chat)
    assert_same(answers(found), wanted)


@pytest.mark.parametrize("policy", [EVICTS, DROPS, BOUNDED], ids=["evicts", "drops", "bounded"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_later_is_not_seen_by_the_policy(
    evaluate: Evaluate, tmp_path: Path, kind: str, policy: dict[str, Any]
) -> None:
    task = local_task(tmp_path, kind, documents())
    later = answers(evaluate(task, "kvpolicy", question="later", **policy))
    batched = evaluate(task, "kvpolicy", question="later", batch_size=3, **policy)
    assert_same(answers(batched), later)
    assert later != answers(evaluate(task, "kvpolicy", question="with", **policy))


@torch.no_grad()
def by_hand(document: str, question: str, policy: CachePolicy, count: int) -> list[int]:
    """Read a document, append a question, decode greedily: token by token."""
    model, tokenizer = tiny_model("llama", seed=1), char_tokenizer()
    cache, found = PolicyCache(policy), list[int]()
    ids: Tensor = tokenizer(document, return_tensors="pt").input_ids
    asked: Tensor = tokenizer(question, return_tensors="pt").input_ids
    with cache.attached(model):
        model(ids, cache=cache)
        for token in asked[0]:
            logits = model(token.view(1, 1), cache=cache).logits
        for _ in range(count):
            found.append(int(logits[0, -1].argmax()))
            logits = model(torch.tensor([[found[-1]]]), cache=cache).logits
    return found


def requests(docs: list[dict[str, Any]], task: str = "local_generate_until") -> list[Instance]:
    arguments = {"max_gen_toks": 6, "until": ["\n"]}
    return [
        Instance("generate_until", doc, (doc["context"] + doc["question"], arguments), 0,
                 metadata=(task, index, 1))
        for index, doc in enumerate(docs)
    ]  # fmt: skip


def test_answers_are_those_of_a_loop_by_hand_and_costs_are_in_order() -> None:
    docs, tokenizer = documents(), char_tokenizer()
    model = tiny_model("llama", seed=1)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    lm = PolicyLM(model, tokenizer=tokenizer, policy=POLICY, question="later", batch_size=3)
    found = lm.generate_until(requests(docs[::-1]), disable_tqdm=True)
    assert lm.question == "later"
    assert len(lm.last_costs) == len(docs)
    for doc, answer, costs in zip(docs[::-1], found, lm.last_costs, strict=True):
        text = tokenizer.decode(by_hand(doc["context"], doc["question"], POLICY, 6))
        assert answer == text.split("\n")[0].split("<eos>")[0]
        kept = max(int(len(doc["context"]) * 0.2), 4) + len(doc["question"])
        assert costs.prompt_tokens == len(doc["context"] + doc["question"])
        assert costs.kept_tokens == kept
        # Keys and values of 4 layers, 2 KV heads of 8, in float32.
        assert costs.bytes_held == kept * 4 * 2 * 2 * 8 * 4
        assert 0 < costs.prefill_seconds < costs.total_seconds


def test_costs_with_the_question() -> None:
    docs = documents()
    lm = PolicyLM(tiny_model("llama", seed=1), tokenizer=char_tokenizer(), policy=POLICY)
    lm.generate_until(requests(docs), disable_tqdm=True)
    lengths = [len(doc["context"] + doc["question"]) for doc in docs]
    assert [costs.prompt_tokens for costs in lm.last_costs] == lengths
    assert [costs.kept_tokens for costs in lm.last_costs] == [int(n * 0.2) for n in lengths]
    scored = [
        Instance("loglikelihood", doc, (doc["context"], choice), at)
        for doc in docs
        for at, choice in enumerate(doc["choices"])
    ]
    lm.loglikelihood(scored, disable_tqdm=True)
    read = [len(request.args[0]) for request in scored]
    assert [costs.prompt_tokens for costs in lm.last_costs] == read
    wanted = [int((length - 1) * 0.2) + 1 for length in read]
    assert [costs.kept_tokens for costs in lm.last_costs] == pytest.approx(wanted)


def test_beams_are_one_request() -> None:
    model, tokenizer = tiny_model("llama", seed=1), char_tokenizer()
    lm = PolicyLM(model, tokenizer=tokenizer, policy=POLICY, question="later", batch_size=2)
    asked = requests(documents(2))
    alone = lm.generate_until(asked, disable_tqdm=True), lm.last_costs
    for request in asked:
        request.arguments[1]["num_beams"] = 3
    assert len(lm.generate_until(asked, disable_tqdm=True)) == 2
    for one, beams in zip(alone[1], lm.last_costs, strict=True):
        assert (beams.prompt_tokens, beams.kept_tokens) == (one.prompt_tokens, one.kept_tokens)
        assert beams.bytes_held == 3 * one.bytes_held


def test_a_task_without_a_splitter() -> None:
    lm = PolicyLM(tiny_model("llama", seed=1), tokenizer=char_tokenizer(), question="later")
    message = r"no splitter.*register_splitter\('unknown_task', .*fields context, question"
    with pytest.raises(ValueError, match=message):
        lm.generate_until(requests(documents(1), task="unknown_task"), disable_tqdm=True)


def test_no_room_for_the_document() -> None:
    lm = PolicyLM(
        tiny_model("llama", seed=1), tokenizer=char_tokenizer(), question="later", max_length=10
    )
    with pytest.raises(ValueError, match="max_length must leave room for the document"):
        lm.generate_until(requests(documents(1)), disable_tqdm=True)


def test_where_tasks_of_the_harness_end_their_documents() -> None:
    doc = {"context": "A text.", "input": "Head.\nbody body\nWhat is it?"}
    prompt = "Read this.\n\nA text.\n\nNow: who? A text"
    assert prompt[document_end("longbench_qasper", doc, prompt) :] == "\n\nNow: who? A text"
    prompt = f"[user]{doc['input']}\n[assistant]It is"
    rest = "What is it?\n[assistant]It is"
    assert prompt[document_end("niah_single_1", doc, prompt) :] == rest
    assert prompt[document_end("ruler_vt", doc, prompt) :] == rest
    with pytest.raises(ValueError, match="'longbench_\\*' must find the document"):
        document_end("longbench_qasper", doc, "another")
    register_splitter("longbench_mine", lambda doc, prompt: 0)
    with pytest.raises(ValueError, match="must return a number of characters in"):
        document_end("longbench_mine", doc, prompt)
