"""Long answers: what a prompt holds, how answers count, and that the bundled model walks."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.evaluation.comparison.accuracy import measure_accuracy
from kvpolicy.evaluation.models import load
from kvpolicy.evaluation.tasks.long_answers import (
    KINDS,
    MODEL_DIR,
    LongAnswerTask,
    load_model,
    load_tokenizer,
    right_steps,
)
from kvpolicy.evaluation.tasks.long_answers.vocabulary import token_names
from kvpolicy.evaluation.tasks.own_prompts import long_prompts
from kvpolicy.policies import FullContext, StreamingLLM

NAMES = token_names()


def words_of(tokens: tuple[int, ...]) -> list[str]:
    return [NAMES[token] for token in tokens]


def stated(words: list[str]) -> dict[str, str]:
    """Where each symbol leads, read off a prompt's words."""
    return {words[at + 1]: words[at + 2] for at, word in enumerate(words) if word == "LET"}


def walked(words: list[str], steps: int) -> str:
    """The answer that a reader of the prompt writes."""
    leads, here, said = stated(words), words[words.index("FROM") + 1], []
    for _ in range(steps):
        said.append(f"{here} -> {leads[here]} ;")
        here = leads[here]
    return " ".join(said)


@given(
    kind=st.sampled_from(KINDS),
    context=st.integers(64, 300),
    steps=st.integers(1, 12),
    seed=st.integers(0, 10**6),
)
def test_the_answer_is_what_a_reader_writes(kind: str, context: int, steps: int, seed: int) -> None:
    task = LongAnswerTask(kind, context, steps=steps)
    prompt = task.prompts(1, seed)[0]
    words = words_of(prompt.input_ids)
    assert len(words) == context
    assert words[0] == "<bos>"
    assert words[-3] == "FROM"
    assert words[-1] == ";"
    assert len(stated(words)) == words.count("LET") == task.num_statements
    assert " ".join(words_of(prompt.answer)) == walked(words, steps)


def test_a_loop_goes_round_half_of_the_statements() -> None:
    prompt = LongAnswerTask("loop", 128, num_statements=10, steps=17).prompts(1, seed=3)[0]
    leads = stated(words_of(prompt.input_ids))
    said = words_of(prompt.answer)[::4]
    assert len(set(said)) == 5
    assert said == (said[:5] * 4)[:17]
    others = set(leads) - set(said)
    assert {leads[each] for each in others} == others


def test_a_chain_needs_every_statement_once() -> None:
    prompt = LongAnswerTask("chain", 128, num_statements=11).prompts(1, seed=3)[0]
    words = words_of(prompt.input_ids)
    steps = words_of(prompt.answer)
    assert set(zip(steps[::4], steps[2::4], strict=True)) == set(stated(words).items())
    assert len(set(steps[::4])) == len(steps) // 4 == 11
    assert list(stated(words)) != steps[::4]


def test_statements_of_the_two_halves_are_mixed() -> None:
    """Where a statement stands does not tell whether the walk needs it."""
    places = []
    for prompt in LongAnswerTask("loop", 256).prompts(60, seed=2):
        order = list(stated(words_of(prompt.input_ids)))
        needed = set(words_of(prompt.answer)[::4])
        places += [order.index(each) for each in needed]
    # 12 of 24 in each of 60 prompts: the mean of a place is 11.5, its deviation below 0.2.
    assert abs(sum(places) / len(places) - 11.5) < 1.0


def test_prompts_follow_their_seed() -> None:
    task = LongAnswerTask("loop", 64)
    first = task.prompts(3, seed=11)
    assert task.prompts(5, seed=11)[:3] == first
    assert task.prompts(3, seed=12) != first
    assert len({prompt.input_ids for prompt in first}) == 3


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ("a -> b ; b -> c ; c -> a ;", 1.0),
        ("a -> b ; b -> c ; c -> a ; a -> b ;", 1.0),
        ("a -> b ; b -> a ; c -> a ;", 1 / 3),
        ("a -> b ; b -> c", 1 / 3),
        ("a -> b ; b -> c ; c -> a ,", 2 / 3),
        ("b -> c ; c -> a ;", 0.0),
        ("", 0.0),
    ],
)
def test_steps_count_up_to_the_first_wrong_one(said: str, share: float) -> None:
    answer = ["a", "->", "b", ";", "b", "->", "c", ";", "c", "->", "a", ";"]
    assert right_steps(said.split(), answer) == share


def test_prompts_of_the_comparison_count_whole_answers_and_steps() -> None:
    prompts = long_prompts(64, count=5, seed=1)
    assert [prompt.kind for prompt in prompts] == ["loop"] * 3 + ["chain"] * 2
    prompt = prompts[0]
    answer = list(prompt.answers[0])
    assert prompt.scores(answer) == {"loop": 1, "loop steps": 1.0}
    assert prompt.scores(answer[:-1]) == {"loop": 0, "loop steps": 31 / 32}
    with pytest.raises(ValueError, match="context must be at least 64 tokens, got 63"):
        long_prompts(63)
    with pytest.raises(ValueError, match="count must be at least 2"):
        long_prompts(64, count=1)


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match="kind"):
        LongAnswerTask("walk")
    with pytest.raises(TypeError, match="context_len"):
        LongAnswerTask("loop", "256")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_statements must be even and in \[4, 64\].* got 7"):
        LongAnswerTask("loop", num_statements=7)
    with pytest.raises(ValueError, match=r"num_statements must be in \[2, 64\], got 65"):
        LongAnswerTask("chain", num_statements=65)
    with pytest.raises(ValueError, match="steps must be at most 8, the chain's length, got 9"):
        LongAnswerTask("chain", num_statements=8, steps=9)
    with pytest.raises(ValueError, match="context_len must be at least 64 tokens .* got 63"):
        LongAnswerTask("chain", 63, num_statements=20)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        LongAnswerTask().prompts(-1)
    with pytest.raises(ValueError, match="answer must hold at least one step"):
        right_steps([], [])


def test_importing_the_task_imports_no_transformers() -> None:
    code = (
        "import sys; from kvpolicy.evaluation.tasks.long_answers import task; "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_tokenizer_writes_prompts_as_text_and_back() -> None:
    tokenizer = load_tokenizer()
    for kind in KINDS:
        prompt = LongAnswerTask(kind, 64).prompts(1)[0]
        text = tokenizer.decode(prompt.input_ids)
        assert text == " ".join(words_of(prompt.input_ids))
        assert tuple(tokenizer(text).input_ids) == prompt.input_ids


def test_the_bundled_files_are_small() -> None:
    assert sum(file.stat().st_size for file in MODEL_DIR.iterdir()) < 2e6


def test_the_bundled_model_is_loaded_by_its_name() -> None:
    loaded, model = load("long_answers"), load_model()
    assert loaded.dtype == "float32"
    assert not loaded.bundled  # the needle questions are not its
    for one, other in zip(loaded.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_bundled_model_answers() -> None:
    """Without a bound nearly every step of every answer, of 512 tokens and of 192."""
    scores = measure_accuracy(load_model(), long_prompts(256, count=8, seed=5), FullContext())
    assert list(scores) == ["loop", "loop steps", "chain", "chain steps"]
    assert scores["loop steps"].rate > 0.95
    assert scores["chain steps"].rate > 0.95


def test_a_bound_too_small_for_the_facts_fails() -> None:
    model, prompts = load_model(), long_prompts(64, count=8, seed=5)
    small, large = (
        measure_accuracy(
            model, prompts, FullContext(decoding=StreamingLLM().decoding_rule(tokens, every=8))
        )
        for tokens in (8, 512)
    )
    assert large == measure_accuracy(model, prompts, FullContext())
    for kind in KINDS:
        assert small[kind].rate == 0.0
        assert small[f"{kind} steps"].rate < 0.5
