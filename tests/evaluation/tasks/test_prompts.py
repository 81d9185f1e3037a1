"""Prompts: what counts as answered, and what a file may hold."""

from pathlib import Path

import pytest

from kvpolicy.evaluation import Prompt, needle_prompts, read_prompts
from kvpolicy.evaluation.text_files import read_text


class WordTokenizer:
    """Words to numbers and back; a leading space makes other tokens, as in byte-pair encodings."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.unk_token_id = None

    @property
    def all_special_ids(self) -> list[int]:
        return [at for at, word in enumerate(self.words) if word == "<s>"]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        pieces = ["<s>"] if add_special_tokens else []
        if text.startswith(" "):
            pieces += [f" {word}" for word in text.split()]
        else:  # a word at the beginning of a text takes a token a letter
            first, *others = text.split()
            pieces += [*first, *(f" {word}" for word in others)]
        self.words += [piece for piece in pieces if piece not in self.words]
        return [self.words.index(piece) for piece in pieces]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        pieces = (self.words[each] for each in ids)
        return "".join(piece for piece in pieces if piece != "<s>")


@pytest.mark.parametrize(
    ("generated", "matches"),
    [([7, 8], True), ([7, 8, 9], True), ([7], False), ([8, 7], False), ([], False)],
)
def test_answer_is_a_prefix_of_the_continuation(generated: list[int], matches: bool) -> None:
    assert Prompt((1,), ((7, 8),)).is_match(generated) is matches


def test_text_answer_matches_in_either_spelling() -> None:
    tokenizer = WordTokenizer()
    letters = tokenizer.encode("Paris", add_special_tokens=False)
    spaced = tokenizer.encode(" Paris it is", add_special_tokens=False)
    other = tokenizer.encode(" Parish of", add_special_tokens=False)
    prompt = Prompt((1,), (tuple(letters), tuple(spaced[:1])), decode=tokenizer.decode)
    assert prompt.max_new_tokens == 5
    assert prompt.is_match(spaced)
    assert prompt.is_match([*letters, *spaced[1:]])
    assert not prompt.is_match(other)
    assert not prompt.is_match(letters[:4])


def test_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "Where is it?", "answer": " Paris "}\n\n{"prompt":"a","answer":"b"}'
    )
    tokenizer = WordTokenizer()
    first, second = read_prompts(file, tokenizer)
    assert tokenizer.decode(list(first.input_ids)) == "Where is it?"
    assert [tokenizer.decode(list(answer)) for answer in first.answers] == ["Paris", " Paris"]
    assert first.is_match(tokenizer.encode(" Paris , France", add_special_tokens=False))
    assert not first.is_match(tokenizer.encode(" Rome", add_special_tokens=False))
    assert len(second.input_ids) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", "got invalid JSON"),
        ('["prompt", "answer"]', "got list"),
        ('{"prompt": "a"}', "answer=None"),
        ('{"prompt": 3, "answer": "b"}', "prompt=3"),
        ('{"prompt": "a", "answer": "  "}', "answer='  '"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n\n' + line)
    with pytest.raises(ValueError, match=r"^line 3 of .*must be a JSON object") as error:
        read_prompts(file, WordTokenizer())
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b" \n\n", "is empty"), (b"\xff\xfe", "UTF-8"), (b"a\0b", "NUL bytes")],
)
def test_file_that_is_no_text(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_text(file, "prompt file")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_text(tmp_path / "none", "prompt file")
    with pytest.raises(ValueError, match="must be a file"):
        read_text(tmp_path, "prompt file")


@pytest.mark.parametrize("context_len", [64, 67, 130])
def test_needle_prompts_are_half_and_half(context_len: int) -> None:
    prompts = needle_prompts(context_len, count=7, seed=3)
    assert [prompt.kind for prompt in prompts] == ["one-hop"] * 4 + ["two-hop"] * 3
    assert {len(prompt.input_ids) for prompt in prompts} == {context_len}
    assert prompts == needle_prompts(context_len, count=7, seed=3)
    assert prompts != needle_prompts(context_len, count=7, seed=4)


def test_needle_prompts_bad_arguments() -> None:
    with pytest.raises(ValueError, match="context must be at least 64 tokens, got 63"):
        needle_prompts(63)
    with pytest.raises(ValueError, match="count must be at least 2"):
        needle_prompts(64, count=1)
