"""Sweeps: what is asked of the model, what is made of the answers, and what is printed."""

from io import StringIO

import pytest
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation import (
    Calibration,
    LayerDistance,
    Prompt,
    RateSweep,
    Score,
    Sweep,
    TSPDistances,
    load,
    needle_prompts,
    select_tsp_layer,
    sweep_rates,
    sweep_tsp_layers,
)
from kvpolicy.evaluation.comparison import study
from kvpolicy.evaluation.comparison.settings import Settings
from kvpolicy.evaluation.comparison.study import CALIBRATION_COUNT, check, run
from kvpolicy.evaluation.comparison.sweep import GRID, SEED_OFFSET
from kvpolicy.evaluation.comparison.tables import held_out_legend, held_out_table, rate_sweep_table
from kvpolicy.evaluation.defaults import CALIBRATION_SEED_OFFSET
from kvpolicy.evaluation.options import PolicyOptions
from kvpolicy.policies import FastKV, FullContext
from tests.reference import tiny_model

PROMPTS = [Prompt((1,), ((2,),))]


def rows(table: Table, header: int = 2) -> list[list[str]]:
    text = StringIO()
    Console(file=text, width=80, highlight=False).print(table)
    assert max(map(len, text.getvalue().splitlines())) <= 80
    return [line.split() for line in text.getvalue().splitlines()[header:]]


def calibrated(layer: int) -> Calibration:
    table = tuple(LayerDistance(index, 0.5, 1.0, 0.1, 0.2) for index in range(layer + 1))
    return Calibration(layer, TSPDistances(table, 4, 0.2, (9, 9)), "argmin", 0.01)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What accuracy was asked of; the n-th answer is n of 100."""
    policies: list[object] = []

    def measure(model: PreTrainedModel, prompts: object, policy: object, **_: object) -> object:
        policies.append(policy)
        return {"exact match": Score(len(policies), 100)}

    monkeypatch.setattr("kvpolicy.evaluation.comparison.sweep.measure_accuracy", measure)
    return policies


def test_rates_up_to_the_tsp_rate(asked: list[object]) -> None:
    found = sweep_rates(tiny_model("llama", seed=3), PROMPTS, [0.1, 0.4], [0.4, 0.1, 0.2])
    assert asked == [
        FullContext(),
        FastKV(tsp_layer=None, tsp_rate=0.1, retention_rate=0.1),
        FastKV(tsp_layer=None, tsp_rate=0.4, retention_rate=0.4),
        FastKV(tsp_layer=None, tsp_rate=0.4, retention_rate=0.1),
        FastKV(tsp_layer=None, tsp_rate=0.4, retention_rate=0.2),
    ]
    assert found.tsp_layer == 1  # the default of 4 layers
    assert rows(rate_sweep_table(found)) == [
        ["exact", "match", "0.1", "2.0"],
        ["0.4", "4.0", "5.0", "3.0"],
        ["full", "1.0"],
    ]
    data = found.as_data()
    assert data["full_context"]["exact match"]["matches"] == 1
    assert [
        (each["tsp_rate"], each["retention_rate"], each["exact_match"]["exact match"]["matches"])
        for each in data["rates"]
    ] == [(0.1, 0.1, 2), (0.4, 0.4, 3), (0.4, 0.1, 4), (0.4, 0.2, 5)]


def test_rates_at_a_layer(asked: list[object]) -> None:
    found = sweep_rates(tiny_model("llama", seed=3), PROMPTS, [0.2], [0.2], tsp_layer=3)
    assert found.tsp_layer == 3
    assert asked[1] == FastKV(tsp_layer=3, tsp_rate=0.2, retention_rate=0.2)


@pytest.mark.parametrize(
    ("tsp_rates", "rates", "layer", "said"),
    [
        ([0.2], [0.3], None, "retention_rates must hold one that does not exceed"),
        ([0.2], [], None, "retention_rates must hold one"),
        ([0.2], [0.1, 1.5], None, r"retention_rates must be in \(0, 1\], got 1.5"),
        ([0.2, 0.0], [0.1], None, r"tsp_rates must be in \(0, 1\], got 0.0"),
        ([0.2], [0.1], 4, r"tsp_layer must be in \[0, 3\]"),
    ],
)
def test_bad_rates(
    asked: list[object], tsp_rates: list[float], rates: list[float], layer: int | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        sweep_rates(tiny_model("llama", seed=3), PROMPTS, tsp_rates, rates, tsp_layer=layer)
    assert asked == []


def test_the_table_of_all_rates_is_narrow_enough() -> None:
    scores = {"one-hop": Score(1, 1), "two-hop": Score(0, 3)}
    grid = {(tsp, rate): scores for tsp in GRID for rate in GRID if rate <= tsp}
    lines = rows(rate_sweep_table(RateSweep(grid, scores, 2)))
    assert lines[4] == ["0.4", *["100.0"] * 5]
    assert lines[6] == ["two-hop", "0.02", "0.0"]


def test_the_calibrated_layer_beside_the_best_by_hand() -> None:
    """Best is the mean over the kinds, the earliest of equals, and no kind's best alone."""

    def scores(one: int, two: int) -> dict[str, Score]:
        return {"one-hop": Score(one, 10), "two-hop": Score(two, 10)}

    layers = (scores(10, 0), scores(7, 6), scores(6, 7), scores(5, 5))
    reversed_layers = tuple(reversed(layers))
    sweep = Sweep({0.1: layers, 0.2: reversed_layers}, scores(10, 10), calibrated(2))
    assert [(each.calibrated_layer, each.best_layer) for each in sweep.held_out] == [(2, 1)] * 2
    assert rows(held_out_table(sweep)) == [
        ["0.1", "2", "60.0", "70.0", "1", "70.0", "60.0"],
        ["0.2", "2", "70.0", "60.0", "1", "60.0", "70.0"],
    ]
    first = sweep.as_data()["held_out"][0]
    assert first["calibrated_layer"] == 2
    assert first["calibrated"]["two-hop"]["rate"] == 0.7
    assert first["best_layer"] == 1
    assert first["best"]["two-hop"]["rate"] == 0.6
    assert "layer chosen of 0 to 2 by argmin, on 2 prompts" in held_out_legend(sweep)[0]


def test_without_a_calibration_nothing_is_held_out() -> None:
    sweep = Sweep({0.1: ({"a": Score(1, 1)},)}, {"a": Score(1, 1)})
    assert sweep.held_out == []
    assert {"calibration", "held_out"}.isdisjoint(sweep.as_data())


def test_a_sweep_carries_the_calibration(asked: list[object]) -> None:
    sweep = sweep_tsp_layers(tiny_model("llama", seed=3), PROMPTS, [0.1], calibration=calibrated(1))
    assert [each.calibrated["exact match"].matches for each in sweep.held_out] == [3]
    assert [each.best_layer for each in sweep.held_out] == [3]


def test_a_study_calibrates_on_prompts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of the comparison nor those of the sweep."""
    seen = []

    def select(model: object, inputs: list[object], **_: object) -> Calibration:
        seen.append([tuple(each.tolist()) for each in inputs])  # type: ignore[attr-defined]
        return calibrated(2)

    monkeypatch.setattr(study, "select_tsp_layer", select)
    settings = small()
    found = run(settings, check(settings), load())
    assert found.sweep is not None
    assert found.sweep.calibration == calibrated(2)
    assert len({0, SEED_OFFSET, CALIBRATION_SEED_OFFSET}) == 3
    drawn = needle_prompts(96, CALIBRATION_COUNT, 5 + CALIBRATION_SEED_OFFSET)
    assert seen == [[prompt.input_ids for prompt in drawn]]


def test_a_model_that_cannot_be_calibrated_is_still_swept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def select(*_: object, **__: object) -> Calibration:
        raise UnsupportedModelError("model must have a norm, got Odd")

    monkeypatch.setattr(study, "select_tsp_layer", select)
    settings = small()
    found = run(settings, check(settings), load())
    assert found.sweep is not None
    assert found.sweep.calibration is None
    assert "No TSP layer was calibrated: model must have a norm, got Odd." in found.notes


def small() -> Settings:
    return Settings(
        policies=PolicyOptions(names=("snapkv",), rates=(0.2,)),
        context=96,
        count=2,
        seed=5,
        sweep=True,
        rounds=1,
        new_tokens=1,
    )


def test_calibration_finds_the_layer_that_answers() -> None:
    """On the bundled model the layer chosen without answers answers as well as the best one."""
    model = load().model
    drawn = needle_prompts(256, 6, seed=CALIBRATION_SEED_OFFSET)
    inputs = [torch.tensor(prompt.input_ids) for prompt in drawn]
    calibration = select_tsp_layer(model, inputs)
    prompts = needle_prompts(256, 24, seed=SEED_OFFSET)
    sweep = sweep_tsp_layers(model, prompts, [0.2], calibration=calibration)
    (found,) = sweep.held_out
    for kind, best in found.best.items():
        assert found.calibrated[kind].rate >= best.rate - 0.01
    first = sweep.scores[0.2][0]  # a choice that does not look would lose most answers
    assert sum(score.matches for score in first.values()) <= 12
    assert calibration.layer == found.calibrated_layer == 2
