"""The word tasks: what a prompt holds, how answers count, and that the bundled model answers."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.evaluation import load
from kvpolicy.evaluation.tasks.ruler_words import (
    KINDS,
    MODEL_DIR,
    load_model,
    load_tokenizer,
    prompts,
    score,
)
from kvpolicy.evaluation.tasks.ruler_words.vocabulary import TOKEN_IDS
from tests.evaluation.tasks.word_reader import read_answer, statements

LENGTHS = st.sampled_from([128, 131, 257, 1024])
ANSWER_WORDS = {
    "single": 2, "multi-key": 2, "multi-query": 12, "two-hop": 2, "tracing": 3, "common": 1,
    "frequent": 1,
}  # fmt: skip
# What the bundled model answers with full context, with room for the draw of 20 prompts.
LEAST = {
    "single": 0.95, "multi-key": 0.95, "multi-query": 0.95, "two-hop": 0.6, "tracing": 0.85,
    "common": 0.6, "frequent": 0.6,
}  # fmt: skip


@given(kind=st.sampled_from(KINDS), length=LENGTHS, seed=st.integers())
def test_a_reader_finds_the_answer_in_a_prompt_of_exact_length(
    kind: str, length: int, seed: int
) -> None:
    for prompt in prompts(kind, length, count=1, seed=seed):
        words = prompt.input.split()
        assert len(words) == length
        assert words[0] == "<bos>"
        assert prompt.input == f"{prompt.document} {prompt.question}"
        assert set(words) <= set(TOKEN_IDS)
        assert len(set(prompt.outputs)) == len(prompt.outputs) == ANSWER_WORDS[kind]
        assert read_answer(prompt.document, prompt.question) == set(prompt.outputs)
        assert set(prompt.outputs) <= set(prompt.document.split())
        assert score(prompt.answer, prompt.outputs) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_fixes_the_prompts_whatever_the_global_generators_do(kind: str) -> None:
    torch.manual_seed(1)
    first = prompts(kind, 256, count=3, seed=11)
    torch.manual_seed(2)
    assert prompts(kind, 256, count=5, seed=11)[:3] == first
    assert prompts(kind, 256, count=3, seed=12) != first
    assert len({prompt.input for prompt in first}) == 3


@pytest.mark.parametrize("kind", ["multi-key", "multi-query", "two-hop", "tracing"])
def test_other_statements_stand_beside_those_that_answer(kind: str) -> None:
    prompt = prompts(kind, 512, count=1)[0]
    names, roads, _ = statements(prompt.document)
    answered = set(prompt.outputs)
    others = [key for key, name in names.items() if not answered & set(name)]
    assert len(others) >= 10
    if kind in ("two-hop", "tracing"):
        assert len(roads) >= 8


def test_common_and_frequent_words_stand_out() -> None:
    for kind, times in (("common", 4), ("frequent", 2)):
        prompt = prompts(kind, 1024, count=1)[0]
        counts = statements(prompt.document)[2]
        rarest = min(counts[word] for word in prompt.outputs)
        assert rarest >= times * max(
            count for word, count in counts.items() if word not in prompt.outputs
        )


def test_depths_of_a_needle_are_spread_over_the_document() -> None:
    depths = []
    for prompt in prompts("single", 512, count=300):
        words = prompt.document.split()
        depths.append(words.index(prompt.outputs[0]) / 512)
    fifths = [sum(int(depth * 5) == fifth for depth in depths) for fifth in range(5)]
    # 60 are expected in each fifth; 30 is more than four standard deviations away.
    assert min(fifths) > 30


@pytest.mark.parametrize(
    ("generated", "expected"),
    [
        ("river amber fox <end>", 0.5),
        ("moon blue fox amber", 1.0),
        ("amberfox bluemoon", 0.0),
        ("blue blue blue", 0.25),
        ("", 0.0),
    ],
)
def test_score_is_the_part_of_the_words_that_are_found(generated: str, expected: float) -> None:
    assert score(generated, ["amber", "fox", "blue", "moon"]) == expected


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"kind must be one of single, .*got 'double'"):
        prompts("double")
    with pytest.raises(ValueError, match="length must be at least 128 tokens, got 127"):
        prompts("single", 127)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        prompts("single", count=-1)
    with pytest.raises(ValueError, match="outputs must hold at least one word"):
        score("river", [])


def test_importing_the_task_imports_no_transformers() -> None:
    code = (
        "import sys; from kvpolicy.evaluation.tasks.ruler_words import task; "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_tokenizer_writes_prompts_as_text_and_back() -> None:
    tokenizer = load_tokenizer()
    for kind in KINDS:
        prompt = prompts(kind, 256, count=1)[0]
        ids = tokenizer(prompt.input).input_ids
        assert ids == [TOKEN_IDS[word] for word in prompt.input.split()]
        assert tokenizer.decode(ids) == prompt.input
    assert tokenizer("river nonsense").input_ids == [TOKEN_IDS["river"], TOKEN_IDS["<unk>"]]
    assert tokenizer(["river castle", "river"], padding=True).input_ids[1][0] == TOKEN_IDS["<pad>"]


def test_the_bundled_files_are_small() -> None:
    assert sum(file.stat().st_size for file in MODEL_DIR.iterdir()) < 4e6


@pytest.mark.parametrize("kind", KINDS)
def test_the_bundled_model_answers(kind: str) -> None:
    model, tokenizer = load_model(), load_tokenizer()
    asked = prompts(kind, 512, count=20, seed=5)
    ids = torch.tensor(tokenizer([prompt.input for prompt in asked]).input_ids)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked[0].max_new_tokens
    )
    texts = tokenizer.batch_decode(output[:, 512:])
    right = [score(text, prompt.outputs) for text, prompt in zip(texts, asked, strict=True)]
    assert sum(right) / len(right) >= LEAST[kind]


def test_the_bundled_model_is_loaded_by_its_name() -> None:
    loaded, model = load("ruler_words"), load_model()
    assert loaded.dtype == "float32"
    assert not loaded.bundled  # the needle questions are not its
    assert loaded.tokenizer.get_vocab() == load_tokenizer().get_vocab() == TOKEN_IDS
    for one, other in zip(loaded.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
