"""The comparison: what is measured, printed, written and drawn says the same."""

import json
import re
from collections.abc import Iterator
from io import BytesIO, StringIO
from pathlib import Path

import pytest
import torch
from matplotlib import image
from rich.console import Console
from transformers import PreTrainedModel

from kvpolicy.evaluation import (
    Comparison,
    Phase,
    Prompt,
    Row,
    Score,
    Sweep,
    Timing,
    Variant,
    compare,
    load,
    needle_prompts,
    sweep_tsp_layers,
    variants,
)
from kvpolicy.evaluation.commands.compare import show
from kvpolicy.evaluation.comparison.plots import plot_comparison, plot_sweep
from kvpolicy.evaluation.comparison.study import (
    CALIBRATION_COUNT,
    Settings,
    _timing_notes,
    check,
    run,
    write,
)
from kvpolicy.evaluation.comparison.tables import byte_unit, comparison_table, sweep_table
from kvpolicy.integrations.transformers import LayerReport
from kvpolicy.policies import FullContext, SnapKV
from tests.reference import random_tokens, tiny_model


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def rendered(item: object, width: int = 80) -> list[str]:
    text = StringIO()
    Console(file=text, width=width, highlight=False).print(item)
    return text.getvalue().splitlines()


def made_up() -> Comparison:
    """A comparison by hand, with numbers as wide as they come."""
    baseline = Timing(Phase((2000.0, 4000.0), (0.0, 0.0)), Phase((90.0, 90.0), (0.0, 0.0)), None)
    full = Timing(
        Phase((2000.0, 4000.0), (1.0, 2.0)),
        Phase((100.0, 100.0), (3.0, 4.0)),
        LayerReport(131072, 131072.0, 17_179_869_184, 17_179_869_184),
    )
    snap = Timing(
        Phase((1000.0, 1000.0), (1.0, 2.0)),
        Phase((30.0, 90.0), (3.0, 4.0)),
        LayerReport(131072, 13107.0, 1_717_960_704, 17_179_869_184),
    )
    scores = {"one-hop": Score(100, 100), "two-hop": Score(1, 8)}
    rows = (
        Row(Variant("full_context", FullContext()), scores, full),
        Row(Variant("streaming_llm", SnapKV(), 0.15), {**scores, "one-hop": Score(1, 3)}, snap),
    )
    return Comparison(rows, baseline, 131072)


def test_table_by_hand() -> None:
    lines = rendered(comparison_table(made_up()))
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "full_context - 100.0 12.5 131,072 17.18 100.0 3000 x1.00 100.0 x0.90",
        "streaming_llm 0.15 33.3 12.5 13,107 1.72 10.0 1000 x3.00 60.0 x2.00",
    ]
    assert "GB" in lines[1]
    assert max(map(len, lines)) <= 80


def test_data_by_hand() -> None:
    _, row = made_up().as_data()["rows"]
    assert row["policy"] == "streaming_llm"
    assert row["retention_rate"] == 0.15
    assert row["exact_match"]["one-hop"]["rate"] == 1 / 3
    assert row["tokens"] == {"seen": 131072, "kept": 13107.0}
    assert row["kv_bytes"]["share"] == 1_717_960_704 / 17_179_869_184
    assert row["prefill"]["rounds_speedup"] == [2.0, 4.0]
    assert row["prefill"]["speedup"] == 3.0
    assert row["decode"]["min_ms"] == 30.0
    assert row["decode"]["max_ms"] == 90.0
    assert row["decode"]["rounds_cpu_ms"] == [3.0, 4.0]


def test_unsteadiness_by_hand() -> None:
    """Of [2, 4]: quartiles 2.5 and 3.5 around 3; of [1, 3]: 1.5 and 2.5 around 2."""
    comparison = made_up()
    assert comparison.unsteadiness == pytest.approx((0.0 + 0.5) / 2)
    (note,) = _timing_notes(comparison)
    assert "differed by 25%" in note
    snap = comparison.rows[1]
    only_snap = Comparison((snap, snap), comparison.baseline, 9)
    assert only_snap.unsteadiness == pytest.approx(1 / 2)
    full = comparison.rows[0]
    assert _timing_notes(Comparison((full, full), comparison.baseline, 9)) == []


def test_byte_units_at_their_edges() -> None:
    sizes = [0, 999, 1000, 999_999, 1_000_000, 10**9, 10**12, 10**16]
    assert [byte_unit(size)[0] for size in sizes] == ["B", "B", "kB", "kB", "MB", "GB", "TB", "TB"]


def test_every_policy_against_stock_generation() -> None:
    """Full context comes first whether chosen or not, and answers what the stock model answers."""
    model = tiny_model("llama", seed=3)
    prompts = []
    for seed in range(3):
        tokens = random_tokens(seed, 47)
        answer = model.generate(torch.tensor([tokens]), max_new_tokens=2, do_sample=False)[0, 47:]
        prompts.append(Prompt(tuple(tokens), (tuple(answer.tolist()),)))
    chosen = variants(["fastkv", "full_context"], rates=[0.3])
    found = compare(model, prompts, chosen, rounds=1, new_tokens=1)
    assert [row.variant.label for row in found.rows] == ["full_context", "fastkv 0.3"]
    assert found.rows[0].scores == {"exact match": Score(3, 3)}
    assert found.timed_tokens == 47
    assert found.rows[1].timing.held is not None
    assert found.rows[1].timing.held.kept == 14.0  # int(0.3 * 47)
    assert compare(model, prompts, [], rounds=1, new_tokens=1).kinds == ["exact match"]


def test_times_are_of_a_prompt_of_median_length() -> None:
    model = tiny_model("llama", seed=3)
    prompts = [Prompt(tuple(random_tokens(0, length)), ((1,),)) for length in (61, 20, 37)]
    assert compare(model, prompts, [], rounds=1, new_tokens=1).timed_tokens == 37


def test_bad_comparisons() -> None:
    model = tiny_model("llama", seed=3)
    prompts = [Prompt((1, 2, 3), ((4,),))]
    with pytest.raises(ValueError, match="at least one prompt"):
        compare(model, [], [])
    with pytest.raises(ValueError, match=r"tsp_layer must be in \[0, 3\]"):
        compare(model, prompts, variants(["fastkv"], tsp_layer=4))
    with pytest.raises(ValueError, match="different labels"):
        compare(model, prompts, variants(["snapkv"], [0.1]) * 2)


def test_sweep_drops_after_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(model: PreTrainedModel, prompts: object, policy: object, **_: object) -> object:
        asked.append(policy)
        return {"exact match": Score(len(asked), 100)}

    monkeypatch.setattr("kvpolicy.evaluation.comparison.sweep.measure_accuracy", measure)
    found = sweep_tsp_layers(tiny_model("llama", seed=3), [Prompt((1,), ((2,),))], [0.1, 0.4])
    built = [
        variant.policy
        for layer in range(4)
        for variant in variants(["fastkv"], [0.1, 0.4], tsp_layer=layer)
    ]
    assert asked == [FullContext(), *built]
    lines = [line.split() for line in rendered(sweep_table(found))[2:]]
    assert lines[2] == ["2", "6.0", "7.0"]
    assert lines[-1] == ["full", "1.0", "1.0"]
    data = found.as_data()["layers"]
    assert [(each["tsp_layer"], each["retention_rate"]) for each in data[:5]] == [
        *((layer, 0.1) for layer in range(4)),
        (0, 0.4),
    ]
    assert data[2]["exact_match"]["exact match"]["matches"] == 6


@pytest.mark.parametrize("kinds", [["exact match"], ["one-hop", "two-hop"]])
def test_pictures(kinds: list[str]) -> None:
    comparison = made_up()
    scores = {kind: Score(1, 2) for kind in kinds}
    rows = tuple(Row(row.variant, scores, row.timing) for row in comparison.rows)
    drawn = Comparison(rows, comparison.baseline, 9)
    sweep = Sweep({0.1: (scores, scores), 0.2: (scores, scores)}, scores)
    only_full = Comparison(rows[:1], comparison.baseline, 9)
    for picture in (plot_comparison(drawn), plot_sweep(sweep), plot_comparison(only_full)):
        pixels = image.imread(BytesIO(picture))
        assert pixels.shape[:2] == (630, 150 * (1 + 4 * len(kinds)))
        assert pixels.std() > 0.05  # not blank


def test_study_on_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers on the screen are those in the file, and the screen is 80 columns wide."""
    settings = Settings(
        context=128,
        count=6,
        rates=(0.1, 0.3),
        rounds=2,
        new_tokens=2,
        threads=1,
        sweep=True,
        sweep_rates=True,
    )
    study = run(settings, check(settings, tmp_path), load())
    assert write(study, tmp_path) == ["compare.json", "compare.png", "tsp_layers.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "compare.json",
        "compare.png",
        "tsp_layers.png",
    ]
    data = json.loads((tmp_path / "compare.json").read_text())
    lines = rendered(comparison_table(study.comparison))
    assert len(lines) == 2 + len(data["rows"])
    for line, row in zip(lines[2:], data["rows"], strict=True):
        match = row["exact_match"]
        rate = row["retention_rate"]
        cells = line.split()
        assert cells[:5] == [
            row["policy"],
            "-" if rate is None else f"{rate:g}",
            f"{100 * match['one-hop']['rate']:.1f}",
            f"{100 * match['two-hop']['rate']:.1f}",
            f"{row['tokens']['kept']:,.0f}",
        ]
        assert cells[6] == f"{100 * row['kv_bytes']['share']:.1f}"
        assert float(cells[7]) == pytest.approx(row["prefill"]["median_ms"], abs=0.51)
        assert cells[8] == f"x{row['prefill']['speedup']:.2f}"
        assert cells[10] == f"x{row['decode']['speedup']:.2f}"
        token_bytes = row["kv_bytes"]["held"] - row["kv_bytes"]["padding"]
        assert token_bytes == pytest.approx(row["tokens"]["kept"] * 6 * 2 * 2 * 16 * 4)
    assert data["settings"]["count"] == 6
    assert data["settings"]["tsp_layer"] == settings.effective_tsp_layer
    assert data["machine"]["threads"] == 1
    assert data["sweep"]["seed"] != data["settings"]["seed"]
    assert data["sweep"]["calibration"]["input_lengths"] == [128] * CALIBRATION_COUNT
    assert len(data["sweep"]["held_out"]) == 2
    assert data["rate_sweep"]["seed"] == data["sweep"]["seed"]
    assert data["rate_sweep"]["tsp_layer"] == settings.effective_tsp_layer
    assert len(data["rate_sweep"]["rates"]) == 15
    show(study)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"fastkv drops tokens after layer \d, chosen\s+from the sweep", shown)
    assert "fastkv 0.3: tsp_rate raised to 0.3" in shown
    assert re.search(r"calibrated +one- +two- +best", shown)
    assert "by TSP rate and KV retention rate (kept):" in shown


def test_bundled_model_answers_and_needs_its_cache() -> None:
    """What full context answers, and a cache of a few recent tokens does not."""
    loaded = load()
    found = compare(
        loaded.model,
        needle_prompts(256, count=16, seed=11),
        variants(["streaming_llm"], rates=[0.05]),
        rounds=1,
        new_tokens=1,
    )
    full, recent = (sum(score.matches for score in row.scores.values()) for row in found.rows)
    assert full >= 12
    assert recent <= full // 2
