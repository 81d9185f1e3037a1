"""Rows of a batch that are given unlike numbers of tokens: each chooses when it would alone.

A document is read once; rows ask questions of unlike lengths, answer, pause, are given several
tokens at once, and begin another turn. Compared with every row alone, forward by forward.
"""

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache, ReadDocument
from kvpolicy.policies import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    ExpectedAttention,
    KeyDiff,
    ReplayKV,
    SnapKV,
    StreamingLLM,
)
from tests.integrations.decoding.support import bounded
from tests.integrations.lm_eval.support import char_tokenizer
from tests.integrations.support.alone import BesideAlone
from tests.integrations.support.reading import read
from tests.integrations.support.reading_both import Call
from tests.reference import random_tokens, tiny_model

TOKENS, EVERY, TOLERANCE = 14, 5, 1e-4
DOCUMENT = random_tokens(seed=1, length=40)
QUESTIONS = (5, 17, 1, 9)
POLICIES: dict[str, CachePolicy] = {
    each.__name__: bounded(each, TOKENS, EVERY)
    for each in (H2O, RKV, AdaKV, KeyDiff, StreamingLLM, ExpectedAttention)
} | {
    "TOVA": bounded(TOVA, TOKENS, 1),
    "SnapKV": bounded(SnapKV, TOKENS, EVERY, window_size=4),
    "ReplayKV": bounded(ReplayKV, TOKENS, EVERY),
    "window_of_9": bounded(SnapKV, TOKENS, EVERY, window_size=9),
}
# By forward, how many tokens each row is given.
STEP = (1, 1, 1, 1)
ANSWER = [QUESTIONS, *[STEP] * 12]
PAUSES = [(0, 1, 1, 0)] * 7 + [STEP] * 2 + [(1, 0, 1, 1)] * 3 + [(3, 1, 6, 2)] + [STEP] * 9


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=5)


def rows_of(seed: int, counts: Sequence[int]) -> list[list[int]]:
    """Tokens that depend on the row and the forward alone."""
    return [random_tokens(seed * 10 + row, count) for row, count in enumerate(counts)]


def forwards_of(counts: Sequence[Sequence[int]], first: int = 1) -> list[list[list[int]]]:
    return [rows_of(first + index, each) for index, each in enumerate(counts)]


@pytest.mark.parametrize("name", POLICIES)
def test_each_row_chooses_as_it_does_alone(model: PreTrainedModel, name: str) -> None:
    """Questions, an answer, pauses, rows that change places, several tokens at once."""
    policy = POLICIES[name]
    side = BesideAlone(model, model, (), policy, None, PolicyCache(policy))  # type: ignore[arg-type]
    side.prompt([DOCUMENT] * 4, [0] * 4, Call())
    for number, rows in enumerate(forwards_of([*ANSWER, *PAUSES])):
        if number == len(ANSWER) + 3:  # when some rows have paused
            side.take_rows([2, 0, 3, 1], reorder=True)
        longest = max(map(len, rows))
        side.append([[*[None] * (longest - len(row)), *row] for row in rows], Call())
        side.check()
    side.close()
    assert all(len(row.kept) > 2 for row in side.rows)
    for layer in side.cache.layers:
        assert layer.observed.count <= 9 + EVERY  # of the rule with the longest window


TEXT = "it was a dark night, and the rain fell in torrents; the street lamps were dim."
ASKED = [" who?", " what fell at dusk", "?", " where at"]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["SnapKV", "H2O", "TOVA", "KeyDiff", "StreamingLLM", "RKV"])
def test_questions_of_one_document(model: PreTrainedModel, name: str, beams: int) -> None:
    document = ReadDocument(model, char_tokenizer(), TEXT, POLICIES[name])
    how = {"max_new_tokens": 16, "num_beams": beams}
    wanted = [document.answer([question], **how)[0] for question in ASKED]
    assert document.answer(ASKED, **how) == wanted


def test_rows_of_one_length_are_counted_together(model: PreTrainedModel) -> None:
    """No row is looked at by itself where all are given as many tokens."""
    cache, _ = read(model, POLICIES["SnapKV"], torch.tensor([DOCUMENT] * 3))
    for rows in forwards_of([(9, 9, 9), *[(1, 1, 1)] * 7]):
        with torch.no_grad(), cache.attached(model):
            model(torch.tensor(rows), cache=cache)
        assert cache._reader.tokens is not None
        assert cache._reader.tokens.rows_since is None
        assert not any(layer.contents.padded for layer in cache.layers)
