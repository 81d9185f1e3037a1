"""Scores of policies on a random Llama, against a second implementation that shares no code.

`tests.reference` reads, keeps and decodes one token at a time in plain loops.
"""

import math
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy.evaluation import scoring
from kvpolicy.evaluation.asking import Asked, Asker
from kvpolicy.evaluation.scoring import FULL, outcomes
from kvpolicy.evaluation.tasks.question import Question
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import AdaKV, FastKV, FullContext, GemFilter, SnapKV, StreamingLLM
from kvpolicy.policy import CachePolicy
from tests import reference
from tests.integrations.lm_eval.support import char_tokenizer
from tests.reference import ReferenceState, tiny_model

NEW_TOKENS = 6
TEXTS = (
    "It was late, and the rain fell on 7 hats.",
    "Of 12 lamps none was lit; 3 were lost, he said!",
)
QUESTIONS = [
    Question(
        document=text,
        question="How many?",
        answers=("7 hats", "none"),
        kind=f"kind {index}",
        new_tokens=NEW_TOKENS,
        one_line=False,
        score=lambda text, answers: len(set(text)) / 100,
    )
    for index, text in enumerate(TEXTS)
]
POLICIES: dict[str, tuple[CachePolicy | None, reference.Method]] = {
    "all": (None, reference.FullContext()),
    "snap": (
        SnapKV(retention_rate=0.3, window_size=4, kernel_size=3),
        reference.SnapKV(retention_rate=0.3, window_size=4, kernel_size=3),
    ),
    "fast": (
        FastKV(tsp_layer=1, tsp_rate=0.5, retention_rate=0.3, window_size=4, kernel_size=3),
        reference.FastKV(
            tsp_layer=1, tsp_rate=0.5, retention_rate=0.3, window_size=4, kernel_size=3
        ),
    ),
    "stream": (StreamingLLM(retention_rate=0.2), reference.StreamingLLM(retention_rate=0.2)),
}
POLICY = {name: policy for name, (policy, _) in POLICIES.items()}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Of large weights, so that distributions are far from uniform."""
    return tiny_model("llama", seed=3)


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    asker = Asker(char_tokenizer())
    return [asker.ask(each) for each in QUESTIONS]


def dense_rows(model: PreTrainedModel, each: Asked, method: Any, later: bool) -> Tensor:
    """Log-probabilities at each token of the right answer, fed one at a time."""
    prompt, after = each.document_ids, (*each.question_ids, *each.answer_ids[:-1])
    if not later:
        prompt, after = (*each.document_ids, *each.question_ids), each.answer_ids[:-1]
    turn = ReferenceState(model, method).turn(prompt, len(after), after)
    rows = turn.logits[-len(each.answer_ids) :]
    return rows.double().softmax(-1).log()


def dense_answer(model: PreTrainedModel, each: Asked, method: Any, later: bool) -> list[int]:
    """Greedy tokens; the question is appended before them if it comes later."""
    if not later:
        prompt = (*each.document_ids, *each.question_ids)
        return ReferenceState(model, method).turn(prompt, NEW_TOKENS - 1).tokens
    answer: list[int] = []
    for _ in range(NEW_TOKENS):
        forced = [*each.question_ids, *answer]
        turn = ReferenceState(model, method).turn(each.document_ids, len(forced), forced)
        answer.append(turn.tokens[-1])
    return answer


@pytest.mark.parametrize("later", [False, True])
def test_equals_the_reference(model: PreTrainedModel, asked: list[Asked], later: bool) -> None:
    found = list(outcomes(model, char_tokenizer(), asked, POLICY, later=later))
    assert [(each.policy, each.kind) for each in found] == [
        (name, f"kind {index}") for index in range(2) for name in POLICIES
    ]
    for own, (each, name) in zip(
        found, [(each, name) for each in asked for name in POLICIES], strict=True
    ):
        method = POLICIES[name][1]
        rows = dense_rows(model, each, method, later)
        full = dense_rows(model, each, POLICIES["all"][1], later)
        right = sum(float(row[token]) for row, token in zip(rows, each.answer_ids, strict=True))
        assert own.log_prob == pytest.approx(right, rel=1e-4)
        assert own.answer_len == len(each.answer_ids)
        assert own.divergence == pytest.approx(by_hand(full, rows), rel=1e-3, abs=1e-6)
        assert own.text == char_tokenizer().decode(dense_answer(model, each, method, later))
        assert own.score == len(set(own.text)) / 100
    assert len({round(each.log_prob, 3) for each in found}) == len(found)
    assert all(each.divergence > 0.01 for each in found if each.policy != "all")
    assert len({each.text for each in found}) > 2


def by_hand(full: Tensor, rows: Tensor) -> float:
    return sum(
        math.exp(p) * (p - q)
        for ps, qs in zip(full.tolist(), rows.tolist(), strict=True)
        for p, q in zip(ps, qs, strict=True)
    ) / len(rows)


@pytest.mark.parametrize("later", [False, True])
def test_full_context_is_no_policy(model: PreTrainedModel, asked: list[Asked], later: bool) -> None:
    """One forward of Transformers alone over prompt and answer."""
    for each in asked:
        (own,) = outcomes(model, char_tokenizer(), [each], {}, later=later)
        assert (own.policy, own.divergence) == (FULL, 0.0)
        prompt = (*each.document_ids, *each.question_ids)
        ids = torch.tensor([(*prompt, *each.answer_ids)])
        with torch.no_grad():
            logits = model(ids, **{CACHE: DynamicCache()}).logits[0]
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        right = rows.gather(1, ids[0, len(prompt) :, None]).sum()
        assert own.log_prob == pytest.approx(float(right), rel=1e-5)
        read = len(each.document_ids) if later else len(prompt)
        assert (own.seen, own.kept) == (read, read)
        assert own.held_bytes == own.full_bytes > 0


@pytest.fixture
def appended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and tokens of each call that appends to a cache."""
    sizes: list[tuple[int, int]] = []
    real = scoring.append

    def noted(model: Any, cache: Any, ids: Sequence[Sequence[int]], **more: Any) -> Tensor:
        sizes.append((len(ids), len(ids[0])))
        return real(model, cache, ids, **more)

    monkeypatch.setattr(scoring, "append", noted)
    return sizes


def test_an_answer_goes_on_where_it_leaves_the_right_one(
    model: PreTrainedModel, asked: list[Asked], appended: list[tuple[int, int]]
) -> None:
    """Tokens of the right answer are read for their probability, and not decoded again."""
    (each,) = asked[:1]
    said = dense_answer(model, each, reference.FullContext(), later=False)
    wrong = (said[2] + 1) % 90 + 1
    for right, count in (
        (said[:4], [3, 1, 1]),  # all agree: 2 of 6 are decoded after them
        ((*said[:2], wrong, 5, 5), [4, 1, 1, 1]),  # two agree, the third is known
        ((wrong, 5), [1, 1, 1, 1, 1, 1]),
    ):
        appended.clear()
        made = attrs.evolve(each, answer_ids=tuple(right))
        (own,) = outcomes(model, char_tokenizer(), [made], {"all": None})
        assert own.text == char_tokenizer().decode(said)
        assert [tokens for _, tokens in appended] == count


def test_answers_of_one_prompt_are_decoded_together(
    model: PreTrainedModel,
    asked: list[Asked],
    appended: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows' texts and probabilities are those of policies asked one at a time."""
    rates = (0.1, 0.2, 0.3, 0.5, 0.8)
    policies = {f"ada {rate}": AdaKV(rate, window_size=2) for rate in rates}
    policies["gem"] = GemFilter(0.4, filter_layer=1)
    said = dense_answer(model, asked[0], reference.FullContext(), later=False)
    asked = [attrs.evolve(asked[0], answer_ids=tuple(said[:4])), asked[1]]
    texts = [it.text for it in outcomes(model, char_tokenizer(), asked, policies)]
    batches = [rows for rows, _ in appended]
    assert max(batches) == len(policies)
    assert 3 in batches  # answers that agree with the right one are decoded from there
    ends = {each for text in texts[-6:-2] for each in char_tokenizer()(text[1]).input_ids}
    monkeypatch.setattr(scoring, "_ends", lambda *_: ends)
    appended.clear()
    found = list(outcomes(model, char_tokenizer(), asked, policies))
    assert 2 in [rows for rows, _ in appended]  # answers that have ended are left out
    for own in found:
        if own.policy != FULL:
            alone = outcomes(model, char_tokenizer(), asked, {own.policy: policies[own.policy]})
            (same,) = (it for it in alone if (it.policy, it.kind) == (own.policy, own.kind))
            for name, value in attrs.asdict(same).items():
                near = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
                assert getattr(own, name) == near


def test_what_is_held_is_counted_before_the_question(
    model: PreTrainedModel, asked: list[Asked]
) -> None:
    rates = {"known": False, "later": True}
    counts = {}
    for name, later in rates.items():
        found = list(outcomes(model, char_tokenizer(), asked[:1], POLICY, later=later))
        counts[name] = {each.policy: (each.seen, each.kept) for each in found}
    document = len(asked[0].document_ids)
    prompt = document + len(asked[0].question_ids)
    assert counts["known"]["stream"] == (prompt, int(prompt * 0.2))
    assert counts["later"]["stream"] == (document, int(document * 0.2))


def test_full_context_is_read_first_under_its_own_name(
    model: PreTrainedModel, asked: list[Asked]
) -> None:
    stream = StreamingLLM(retention_rate=0.2)
    names = [
        each.policy
        for each in outcomes(model, char_tokenizer(), asked, {"stream": stream, "mine": None})
    ]
    assert names == ["mine", "stream", "mine", "stream"]
    names = [each.policy for each in outcomes(model, char_tokenizer(), asked[:1], {"s": stream})]
    assert names == [FULL, "s"]


def test_a_continuation_has_no_question(model: PreTrainedModel) -> None:
    """It is the same whether the question is known or not, and nothing is generated."""
    question = attrs.evolve(
        QUESTIONS[0], question="", plain=True, expected=" and gone", new_tokens=0
    )
    asked = [Asker(char_tokenizer()).ask(question)]
    known, later = (
        list(outcomes(model, char_tokenizer(), asked, POLICY, later=later))
        for later in (False, True)
    )
    assert known == later
    assert all((each.text, each.score) == ("", None) for each in known)


@pytest.mark.parametrize("known", [1, 2])
def test_the_answer_ends(
    known: int, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a line that is not blank, at an end token, or at the most tokens."""
    tokenizer = char_tokenizer()
    said: list[int] = []

    def scripted(model: Any, cache: Any, ids: Sequence[Sequence[int]]) -> Tensor:
        said.extend(ids[0])
        return one_hot(script[len(said)])[None]

    def one_hot(token: int) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor([token]), 97).float()

    monkeypatch.setattr(scoring, "append", scripted)
    for text, ends, expected in (
        ("\n ab\ncd", None, "\n ab\n"),
        ("ab cdefgh", None, "ab cdef"),
        ("abXcd", "X", "ab"),
    ):
        said.clear()
        script = tokenizer(text)["input_ids"]
        model.generation_config.eos_token_id = None if ends is None else tokenizer(ends).input_ids
        question = attrs.evolve(QUESTIONS[0], new_tokens=7, one_line=True)
        asked = Asker(tokenizer).ask(question)
        first = torch.tensor([script[:known]])
        said.extend(script[: known - 1])
        found = scoring._texts(model, tokenizer, None, first, asked)  # type: ignore[arg-type]
        assert found == [expected]
    model.generation_config.eos_token_id = None


def test_a_policy_that_cannot_be_applied_is_named(
    model: PreTrainedModel, asked: list[Asked]
) -> None:
    far = FastKV(tsp_layer=9, tsp_rate=0.5, retention_rate=0.3)
    with pytest.raises(ValueError, match="^policy 'far': tsp_layer"):
        list(outcomes(model, char_tokenizer(), asked, {"far": far}))


def test_long_prompts_are_refused_before_anything_is_read(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "forward", None)
    question = attrs.evolve(QUESTIONS[0], document=600 * "x")
    asked = [Asker(char_tokenizer()).ask(each) for each in (QUESTIONS[0], question)]
    with pytest.raises(ValueError, match="must fit into the model's 512 positions"):
        next(outcomes(model, char_tokenizer(), asked, {"all": FullContext()}))


def test_progress_counts_policies_and_questions(model: PreTrainedModel, asked: list[Asked]) -> None:
    told: list[tuple[str, int, int]] = []
    list(
        outcomes(
            model, char_tokenizer(), asked, {"all": None}, progress=lambda *each: told.append(each)
        )
    )
    assert told == [("questions", done, 2) for done in range(3)]
