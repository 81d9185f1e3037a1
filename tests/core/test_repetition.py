"""A second reading as it is declared, and what goes with it in a policy."""

import pytest

from kvpolicy import CachePolicy, Repetition
from kvpolicy.description import describe, from_description
from kvpolicy.policies import (
    GlobalThresholdSelector,
    KVzip,
    PassAllPropagation,
    PeakAttentionScorer,
    SnapKV,
)

PARTS = (PeakAttentionScorer(), GlobalThresholdSelector(0.3), PassAllPropagation())


def test_chunks_and_what_stands_before_them() -> None:
    reading = Repetition(10, overlap=12, instruction_ids=[1, 2], later_ids=[3])
    assert reading.spans(25) == [(0, 10), (10, 20), (20, 25)]
    assert reading.spans(10) == [(0, 10)]
    assert [reading.before(start) for start in (0, 10, 20)] == [((1, 2), 0), ((3,), 10), ((3,), 12)]
    assert Repetition(instruction_ids=[4]).before(4096) == ((4,), 8)


def test_what_it_costs() -> None:
    reading = Repetition(10, overlap=2, instruction_ids=[1], later_ids=[2, 3], answer_ids=[4])
    # 25 tokens, an instruction of one and two of two, two overlaps, three beginnings of answers.
    assert reading.compute_rate(25) == 1 + (1 + 4 + 4 + 3) / 25
    assert reading.compute_rate() == 1 + 5 / 10
    policy = CachePolicy(*PARTS, rereading=reading)
    assert policy.prefill_compute_rate(4, 25) == 2 + 12 / 25


def test_chunks_behind_tokens_that_are_not_repeated() -> None:
    reading = Repetition(10, overlap=4, instruction_ids=[1], later_ids=[2, 3], unrepeated=7)
    assert reading.spans(25) == [(7, 17), (17, 25)]
    assert reading.spans(7) == reading.spans(3) == []
    assert [reading.before(start) for start in (7, 17)] == [((1,), 0), ((2, 3), 4)]
    # 18 tokens, an instruction of one and one of two, an overlap.
    assert reading.compute_rate(25) == (18 + 1 + 2 + 4) / 25
    assert reading.compute_rate(5) == 0
    assert reading.compute_rate() == 1 + 6 / 10


class Tokenizer:
    """As one of Transformers."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(each) for each in text]


def test_asking_in_words() -> None:
    reading = Repetition.asking(Tokenizer(), "ab", "c", chunk_size=7)
    assert reading == Repetition(7, instruction_ids=(97, 98), later_ids=(99,))
    assert len(Repetition.asking(Tokenizer()).instruction_ids) > 10


def test_an_answer_may_be_bounded() -> None:
    rule = SnapKV().decoding_rule(9)
    assert KVzip(decoding=rule).decoding == rule
    assert "decoding=" in str(KVzip(decoding=rule))


def test_what_a_policy_looks_at() -> None:
    """The prompt's own queries serve nothing then."""
    assert CachePolicy(*PARTS).num_queries is None
    assert CachePolicy(*PARTS, rereading=Repetition()).num_queries == 0
    assert CachePolicy(*PARTS).decides_later
    assert not SnapKV().decides_later
    assert KVzip(head_uniform=True).decides_later


def test_as_it_is_written_and_described() -> None:
    policy = CachePolicy(*PARTS, rereading=Repetition(7, instruction_ids=[3]))
    assert str(policy).endswith("rereading=Repetition(chunk_size=7, instruction_ids=[3]))")
    assert from_description(describe(policy)) == policy
    assert str(KVzip(0.2, instruction_ids=[1])) == "KVzip(retention_rate=0.2, instruction_ids=[1])"
    assert from_description(describe(KVzip(0.2))) == KVzip(0.2)
    assert KVzip(retention_tokens=64).retention_rate is None


class Asks(PeakAttentionScorer):
    needs_rotary = True  # type: ignore[assignment]


class AsksOfAll(GlobalThresholdSelector):
    history_layers = 2  # type: ignore[assignment]


def test_what_no_second_reading_shows() -> None:
    with pytest.raises(ValueError, match="needs_rotary must not be declared"):
        CachePolicy(Asks(), *PARTS[1:], rereading=Repetition())
    CachePolicy(Asks(), *PARTS[1:])
    with pytest.raises(ValueError, match="history_layers must not be declared"):
        CachePolicy(PARTS[0], AsksOfAll(0.3), PARTS[2])
