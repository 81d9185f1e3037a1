"""Rows of a batch that are given unlike numbers of tokens: each chooses when it would alone.

A document is read once; rows ask questions of unlike lengths, answer, pause, are given several
tokens at once, and begin another turn. Compared with every row alone, forward by forward.
"""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
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
from tests.integrations.decoding.reading import held, padded
from tests.integrations.decoding.rules import bounded
from tests.integrations.lm_eval.support import char_tokenizer
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


@attrs.define
class Said:
    """What came of forwards, row by row.

    Attributes:
        logits: of each forward in which the row has tokens, those of its last one.
        kept: what the row held after each of these.
    """

    logits: list[list[Tensor]]
    kept: list[list[Any]]


def rows_of(seed: int, counts: Sequence[int]) -> list[list[int]]:
    """Tokens that depend on the row and the forward alone."""
    return [random_tokens(seed * 10 + row, count) for row, count in enumerate(counts)]


def read_document(model: PreTrainedModel, policy: CachePolicy, **how: Any) -> PolicyCache:
    cache, call = PolicyCache(policy, **how), model
    with torch.no_grad(), cache.attached(model):
        call(input_ids=torch.tensor([DOCUMENT]), cache=cache)
    return cache


@torch.no_grad()
def go_on(model: Any, cache: PolicyCache, forwards: Sequence[list[list[int]]]) -> Said:
    """Forwards of rows of tokens; a row without any pauses."""
    batch = len(forwards[0])
    said = Said([[] for _ in range(batch)], [[] for _ in range(batch)])
    assert cache._reader.tokens is not None
    mask = cache._reader.tokens.valid.long()
    with cache.attached(model):
        for rows in forwards:
            ids, new = padded(rows)
            mask = torch.cat([mask, new], dim=1)
            output = model(input_ids=ids, attention_mask=mask, cache=cache)
            kept = held(cache, batch)
            for row, tokens in enumerate(rows):
                if tokens:
                    said.logits[row].append(output.logits[row, -1])
                    said.kept[row].append(kept[row])
    return said


def alone(forwards: Sequence[list[list[int]]], row: int) -> list[list[list[int]]]:
    """The forwards in which a row has tokens, with these only."""
    return [[rows[row]] for rows in forwards if rows[row]]


def forwards_of(counts: Sequence[Sequence[int]], first: int = 1) -> list[list[list[int]]]:
    return [rows_of(first + index, each) for index, each in enumerate(counts)]


def assert_same(said: Said, row: int, want: Said) -> None:
    assert said.kept[row] == want.kept[0]
    for got, logits in zip(said.logits[row], want.logits[0], strict=True):
        assert (got - logits).abs().max() <= TOLERANCE


def check(
    model: PreTrainedModel, policy: CachePolicy, counts: Sequence[Sequence[int]], **how: Any
) -> PolicyCache:
    """All rows together against each alone; what the batch's cache has come to."""
    document, forwards = read_document(model, policy, **how), forwards_of(counts)
    together = copy.copy(document)
    together.batch_repeat_interleave(len(counts[0]))
    said = go_on(model, together, forwards)
    for row in range(len(counts[0])):
        want = go_on(model, copy.copy(document), alone(forwards, row))
        assert_same(said, row, want)
        assert choices(want.kept[0]) >= 2
    return together


def choices(kept: Sequence[Any]) -> int:
    """How often some head has let tokens go: it holds no more than before a forward."""
    sizes = [[len(head) for layer in each for head in layer] for each in kept]
    pairs = (zip(before, after, strict=True) for before, after in pairwise(sizes))
    return sum(any(now <= once for once, now in each) for each in pairs)


@pytest.mark.parametrize("name", POLICIES)
def test_each_row_chooses_as_it_does_alone(model: PreTrainedModel, name: str) -> None:
    """Questions, an answer, pauses, several tokens at once."""
    cache = check(model, POLICIES[name], [*ANSWER, *PAUSES])
    for layer in cache.layers:
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
    cache = read_document(model, POLICIES["SnapKV"])
    cache.batch_repeat_interleave(3)
    for rows in forwards_of([(9, 9, 9), *[(1, 1, 1)] * 7]):
        go_on(model, cache, [rows])
        assert cache._reader.tokens is not None
        assert cache._reader.tokens.rows_since is None
        assert not any(layer.contents.padded for layer in cache.layers)
