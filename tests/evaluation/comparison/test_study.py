"""Comparisons of policies on a random model: rows are sums of outcomes, times are of turns."""

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from transformers import PreTrainedModel

from kvpolicy.evaluation import compare, variants
from kvpolicy.evaluation.asking import Asked, Asker
from kvpolicy.evaluation.cells import cells_of, compared
from kvpolicy.evaluation.comparison import study, times
from kvpolicy.evaluation.comparison.picture import plot_comparison
from kvpolicy.evaluation.comparison.study import Comparison
from kvpolicy.evaluation.comparison.table import comparison_table, legend, sentences
from kvpolicy.evaluation.comparison.times import Ratio, Times, measure_times
from kvpolicy.evaluation.scoring import Outcome, outcomes
from kvpolicy.evaluation.tasks.question import Question
from kvpolicy.policies import SnapKV
from tests.integrations.lm_eval.support import char_tokenizer
from tests.reference import tiny_model

VARIANTS = variants(["snapkv", "streamingllm"], [0.2, 0.5])
TEXT = "It was late, and the rain fell on 7 hats. Of 12 lamps none was lit; 3 were lost, he said!"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=3)


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    asker = Asker(char_tokenizer())
    texts = [TEXT[start:] + TEXT[:start] for start in range(0, 60, 15)]
    return [
        asker.ask(Question(each, "How many?", ("7 hats",), f"kind {index % 2}", new_tokens=4))
        for index, each in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def found(model: PreTrainedModel, asked: list[Asked]) -> Comparison:
    return compare(model, char_tokenizer(), asked, VARIANTS, rounds=5, new_tokens=2)


def test_rows_are_sums_of_outcomes(
    model: PreTrainedModel, asked: list[Asked], found: Comparison
) -> None:
    policies = {"full_context": None} | {each.label: each.policy for each in VARIANTS}
    own = list(outcomes(model, char_tokenizer(), asked, policies))
    assert found.outcomes == tuple(own)
    assert (found.questions, found.finished) == (4, True)
    assert found.longest == max(each.prompt_len for each in asked)
    cells = {(each.policy, each.kind): each for each in cells_of(own)}
    for row in found.rows:
        label = row.variant.label
        assert row.kinds == {kind: cells[label, kind] for kind in ("kind 0", "kind 1")}
        assert (row.total.policy, row.total.kind, row.total.count) == (label, "all", 4)
        both = [cells[label, kind] for kind in row.kinds]
        assert row.total.log_prob == pytest.approx(sum(each.log_prob for each in both) / 2)
        if row is found.full:
            assert row.difference is None
            continue
        assert row.difference == compared(own, label, "full_context")
        assert found.lost(row) == found.full.total.log_prob - row.total.log_prob
    assert len({row.total.log_prob for row in found.rows}) == len(found.rows)


def test_each_policy_is_timed_at_its_largest_budget(found: Comparison) -> None:
    timed = [row.variant.label for row in found.rows if row.times is not None]
    assert timed == ["full_context", "snapkv 0.5", "streamingllm 0.5"]
    assert all(
        len(each) == 5 and min(each) > 0
        for row in found.rows
        if row.times is not None
        for each in attrs.astuple(row.times)
    )


def test_policies_take_turns(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each round another one is first; what is None runs on Transformers' own cache."""
    seen: list[tuple[str, int]] = []
    real = times.append

    def noted(model: Any, cache: Any, ids: Sequence[Sequence[int]], **more: Any) -> Any:
        seen.append((type(cache).__name__, len(ids[0])))
        return real(model, cache, ids, **more)

    monkeypatch.setattr(times, "append", noted)
    policies = {"full": None, "snap": SnapKV(0.5, window_size=2)}
    measured = measure_times(model, [range(1, 30), range(1, 40)], policies, new_tokens=2)
    assert set(measured) == {"full", "snap"}
    own, ours = "DynamicCache", "PolicyCache"
    warm = [(own, 29), (own, 1), (ours, 29), (ours, 1)]
    first = [(own, 29), (own, 1), (own, 1), (ours, 29), (ours, 1), (ours, 1)]
    second = [(ours, 39), (ours, 1), (ours, 1), (own, 39), (own, 1), (own, 1)]
    assert seen == warm + first + second


def test_ratios_are_of_the_same_round() -> None:
    full, own = Times((2.0, 4.0), (1.0, 1.0)), Times((1.0, 1.0), (2.0, 3.0))
    assert own.ratio(full, "prefill") == Ratio((0.5, 0.25))
    assert own.ratio(full, "decode").median == 2.5
    assert Ratio((1.0, 1.1, 1.0, 1.1, 1.0)).steady
    assert not Ratio((1.0, 1.5, 1.0, 1.1, 0.8)).steady
    assert Ratio((0.5, 0.5, 0.5, 0.5)).text == "0.50?"


def scored(found: Comparison, right: dict[str, float]) -> Comparison:
    """The same with other scores, on ten times the questions."""
    rows = []
    for row in found.rows:
        score = right.get(row.variant.label, 1.0)
        difference = row.difference
        if difference is not None:
            made = [
                attrs.evolve(each, score=score if each.policy == row.variant.label else 1.0)
                for each in found.outcomes * 10
            ]
            difference = compared(made, row.variant.label, "full_context")
        total = attrs.evolve(row.total, score=score, interval=(0.5 * score, score))
        rows.append(attrs.evolve(row, total=total, difference=difference))
    return attrs.evolve(found, rows=tuple(rows))


def test_sentences_say_what_is_clear(found: Comparison) -> None:
    made = scored(found, {"snapkv 0.2": 0.25, "streamingllm 0.5": 0.0})
    assert sentences(made) == [
        "Keeping 20%, clearly fewer right answers: snapkv; no clear difference from full context: "
        "streamingllm.",
        "Keeping 50%, clearly fewer right answers: streamingllm; no clear difference from full "
        "context: snapkv.",
    ]


def test_the_legend_says_what_is_there(found: Comparison) -> None:
    assert any("Times: of full context" in each for each in legend(found))
    untimed = attrs.evolve(found, rows=tuple(attrs.evolve(it, times=None) for it in found.rows))
    assert len(legend(untimed)) == 2
    assert [column.header for column in comparison_table(untimed).columns] == [
        *("\npolicy", "right\nof 4", "kind 0\nof 2", "kind 1\nof 2", "nats\nlost", "KV\n%")
    ]


def test_a_picture_of_answers_or_of_probabilities(found: Comparison) -> None:
    unscored = attrs.evolve(
        found,
        rows=tuple(
            attrs.evolve(row, total=attrs.evolve(row.total, score=None, interval=None))
            for row in found.rows
        ),
    )
    untimed = attrs.evolve(found, rows=tuple(attrs.evolve(it, times=None) for it in found.rows))
    pictures = [plot_comparison(each) for each in (found, unscored, untimed)]
    assert all(each.startswith(b"\x89PNG") for each in pictures)
    assert len({*pictures}) == 3


def test_interrupted_while_it_is_timed(
    model: PreTrainedModel, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are there."""

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "measure_times", stop)
    kept: list[Comparison] = []
    with pytest.raises(KeyboardInterrupt):
        compare(model, char_tokenizer(), asked[:2], VARIANTS[:1], unfinished=kept.append)
    (only,) = kept
    assert (only.questions, only.finished, len(only.rows)) == (2, False, 2)


def test_what_cannot_be_compared(model: PreTrainedModel, asked: list[Asked]) -> None:
    with pytest.raises(ValueError, match="different labels, got full_context, snapkv 0.2, snapkv"):
        compare(model, char_tokenizer(), asked, [VARIANTS[0]] * 2)
    with pytest.raises(ValueError, match="questions must be at least one, got none"):
        compare(model, char_tokenizer(), [], VARIANTS)
    far = variants(["fastkv"], [0.2])[0].at_layers([9])
    with pytest.raises(ValueError, match=r"^fastkv@9 0.2: tsp_layer must be in \[0, 3\]"):
        compare(model, char_tokenizer(), asked, far)


def test_outcomes_have_no_time() -> None:
    """Prompts are read once for all policies: times are measured by themselves."""
    assert not [each.name for each in attrs.fields(Outcome) if "second" in each.name]
