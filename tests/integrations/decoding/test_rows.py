"""Rows of a batch that are given unlike numbers of tokens: each chooses when it would alone.

A document is read once; rows ask questions of unlike lengths, answer, pause, are given several
tokens at once, and begin another turn. Compared with every row alone, forward by forward.
"""

import copy
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
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
    Method,
    SnapKV,
    StreamingLLM,
)
from tests.families import FAMILIES
from tests.integrations.decoding.reading import held, padded
from tests.integrations.decoding.rules import bounded
from tests.integrations.hybrids.models import hybrid
from tests.integrations.lm_eval.support import char_tokenizer
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.model.test_indexed import model_of as indexed_model
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
    "window_of_9": bounded(SnapKV, TOKENS, EVERY, window_size=9),
}
# By forward, how many tokens each row is given.
STEP = (1, 1, 1, 1)
ANSWER = [QUESTIONS, *[STEP] * 12]
PAUSES = [(0, 1, 1, 0)] * 7 + [STEP] * 2 + [(1, 0, 1, 1)] * 3 + [(3, 1, 6, 2)] + [STEP] * 9
TURN = (4, 11, 6, 2)


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
        call(input_ids=torch.tensor([DOCUMENT]), past_key_values=cache)
    return cache


@torch.no_grad()
def go_on(model: Any, cache: PolicyCache, forwards: Sequence[list[list[int]]]) -> Said:
    """Forwards of rows of tokens; a row without any pauses."""
    batch = len(forwards[0])
    said = Said([[] for _ in range(batch)], [[] for _ in range(batch)])
    assert cache.reader.tokens is not None
    mask = cache.reader.tokens.valid.long()
    with cache.attached(model):
        for rows in forwards:
            ids, new = padded(rows)
            mask = torch.cat([mask, new], dim=1)
            output = model(input_ids=ids, attention_mask=mask, past_key_values=cache)
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


@pytest.mark.parametrize("name", ["SnapKV", "H2O", "TOVA"])
def test_with_memory_for_the_answer(model: PreTrainedModel, name: str) -> None:
    """In loops of one's own, buffers grow behind it."""
    check(model, POLICIES[name], ANSWER, max_new_tokens=20)


# Windows; windows, caps and sinks; latents; keys of other layers.
KINDS = {name: FAMILIES[name].build for name in ("gemma3", "gpt_oss", "deepseek_v3")} | {
    "gemma3n_text": lambda: hybrid("gemma3n_text"),
    "glm_moe_dsa": lambda: indexed_model("glm_moe_dsa"),
    "gptj": lambda: builds()["gptj"].model(),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gemma3", "SnapKV"),
        ("gemma3", "H2O"),
        ("gpt_oss", "SnapKV"),
        ("deepseek_v3", "H2O"),
        ("deepseek_v3", "TOVA"),
        ("gemma3n_text", "H2O"),
        ("glm_moe_dsa", "H2O"),
        ("glm_moe_dsa", "SnapKV"),
        ("gptj", "KeyDiff"),
    ],
)
def test_kinds_of_layers(kind: str, name: str) -> None:
    check(KINDS[kind](), POLICIES[name], [*ANSWER, *PAUSES[:14]])


@pytest.mark.parametrize("method", [H2O, SnapKV, AdaKV])
def test_a_turn_behind_rows_that_chose_at_unlike_times(
    model: PreTrainedModel, method: type[Method]
) -> None:
    rule = method(window_size=4).decoding_rule(TOKENS, EVERY)
    document = read_document(model, method(retention_tokens=20, window_size=4, decoding=rule))
    forwards, turn = forwards_of(ANSWER), rows_of(70, TURN)
    later = forwards_of([STEP] * 8, 80)
    together = copy.copy(document)
    together.batch_repeat_interleave(4)
    go_on(model, together, forwards)
    together.start_turn()
    said = go_on(model, together, [turn, *later])
    for row in range(4):
        own = copy.copy(document)
        go_on(model, own, alone(forwards, row))
        own.start_turn()
        assert_same(said, row, go_on(model, own, alone([turn, *later], row)))


@pytest.mark.parametrize("name", ["H2O", "SnapKV", "window_of_9", "ExpectedAttention", "AdaKV"])
@pytest.mark.parametrize("steps", [2, 6])
def test_what_rows_count_goes_along(
    model: PreTrainedModel, name: str, steps: int, tmp_path: Path
) -> None:
    """Into copies and files, with rows that are reordered, and back where tokens are taken back."""
    document, cache = (read_document(model, POLICIES[name]) for _ in range(2))
    first, later = forwards_of(ANSWER[: 1 + steps]), forwards_of([*PAUSES[4:14], *[STEP] * 5], 50)
    cache.batch_repeat_interleave(4)
    go_on(model, cache, first)
    wrong, before = copy.copy(cache), held(cache, 4)
    go_on(model, wrong, [[[], [], [7], []]])  # which lets no row choose
    wrong.crop(-1)
    assert held(wrong, 4) == before
    cache.save(tmp_path / "cache")
    order = [2, 0, 3, 1]
    for other in (wrong, copy.deepcopy(cache), PolicyCache.load(tmp_path / "cache"), cache):
        other.reorder_cache(torch.tensor(order))
        moved = [[rows[row] for row in order] for rows in later]
        said = go_on(model, other, moved)
        for place, row in enumerate(order):
            own = copy.copy(document)
            go_on(model, own, alone(first, row))
            assert_same(said, place, go_on(model, own, alone(later, row)))


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
        assert cache.reader.tokens is not None
        assert cache.reader.tokens.rows_since is None
        assert not any(layer.contents.padded for layer in cache.layers)
