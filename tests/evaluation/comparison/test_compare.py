"""The comparison: what is measured, printed, written and drawn says the same."""

import json
import re
from collections.abc import Iterator
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import attrs
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
from kvpolicy.evaluation.commands.work.compare import show
from kvpolicy.evaluation.comparison.layout import comparison_legend, comparison_table
from kvpolicy.evaluation.comparison.picture import plot_comparison
from kvpolicy.evaluation.comparison.plots import plot_sweep
from kvpolicy.evaluation.comparison.sentences import sentences
from kvpolicy.evaluation.comparison.settings import Settings
from kvpolicy.evaluation.comparison.shown import Budget, Shown, timed_labels
from kvpolicy.evaluation.comparison.study import (
    CALIBRATION_COUNT,
    _timing_notes,
    check,
    run,
    write,
)
from kvpolicy.evaluation.comparison.tables import byte_unit, sweep_table
from kvpolicy.evaluation.comparison.timed import random_llama
from kvpolicy.evaluation.options import PolicyOptions
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
    full = Timing(
        Phase((2000.0, 4000.0), (1.0, 2.0)),
        Phase((90.0, 90.0), (3.0, 4.0)),
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
        Row(Variant("streamingllm", SnapKV(), 0.15), {**scores, "one-hop": Score(1, 3)}, snap),
    )
    return Comparison(rows, 131072)


def with_rounds(prefill: tuple[float, ...], baseline: tuple[float, ...]) -> Comparison:
    """Two rows, by hand, that differ in their prefill's times only."""
    decode = Phase((90.0,) * len(prefill), (0.0,) * len(prefill))
    rows = [
        attrs.evolve(
            row, timing=attrs.evolve(row.timing, prefill=Phase(times, times), decode=decode)
        )
        for row, times in zip(made_up().rows, (baseline, prefill), strict=True)
    ]
    return Comparison(tuple(rows), 131072)


def table_of(comparison: Comparison) -> list[str]:
    return comparison_table(Shown.of(comparison.as_data()))


def test_table_by_hand() -> None:
    """Full context is 1 against itself by definition; two rounds are too few for a speed."""
    assert table_of(made_up()) == [
        "               right answers       cache held    times as fast",
        "policy                   15%        GB      %   prefill decode",
        "full_context              94     17.18  100.0      1.00   1.00",
        "streamingllm              18      1.72   10.0         -      -",
    ]


def test_a_long_name_gets_a_line_of_its_own() -> None:
    full, snap = made_up().rows
    name = "a_policy_of_somebody_with_a_long_name"
    row = attrs.evolve(snap, variant=Variant(name, SnapKV(), 0.15))
    lines = table_of(Comparison((full, row), 131072))
    assert lines[3] == name
    assert lines[4].split()[:2] == ["18", "1.72"]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("prefill", "steady", "shown"),
    [
        ((1000.0, 1010.0, 990.0, 1000.0, 1000.0), True, "2.00"),
        ((1000.0, 2000.0, 990.0, 1000.0, 1000.0), False, "-"),
        ((1000.0, 1000.0, 1000.0, 1000.0), False, "-"),
        ((135.0,), False, "-"),
    ],
)
def test_unsteady_speeds_are_left_out_wherever_they_are_said(
    prefill: tuple[float, ...], steady: bool, shown: str
) -> None:
    comparison = with_rounds(prefill, (2000.0,) * len(prefill))
    assert table_of(comparison)[3].split()[-2] == shown
    data = comparison.as_data()
    full, policy = data["rows"]
    assert policy["prefill"]["steady"] is steady
    assert (policy["prefill"]["interval_90"] is None) is (len(prefill) < 5)
    assert not {"speedup", "steady", "rounds_speedup"} & set(full["prefill"])
    legend = comparison_legend(Shown.of(data), data, "prompts")
    assert any(line.startswith("-: no speed") for line in legend) is not steady
    settings = Settings(rounds=len(prefill))
    assert bool(_timing_notes(settings, comparison)) is not steady


def test_data_by_hand() -> None:
    _, row = made_up().as_data()["rows"]
    assert row["policy"] == "streamingllm"
    assert row["retention_rate"] == 0.15
    assert row["exact_match"]["one-hop"]["rate"] == 1 / 3
    assert row["tokens"] == {"seen": 131072, "kept": 13107.0}
    assert row["kv_bytes"]["share"] == 1_717_960_704 / 17_179_869_184
    assert row["prefill"]["rounds_speedup"] == [2.0, 4.0]
    assert row["prefill"]["speedup"] == 3.0
    assert row["decode"]["min_ms"] == 30.0
    assert row["decode"]["max_ms"] == 90.0
    assert row["decode"]["rounds_cpu_ms"] == [3.0, 4.0]


def test_notes_say_what_is_wrong_with_the_times() -> None:
    unsteady = with_rounds((1000.0, 2000.0, 1000.0, 1000.0, 1000.0), (2000.0,) * 5)
    (note,) = _timing_notes(Settings(rounds=5), unsteady)
    assert note.startswith("Left out, since rounds disagree: 1 of 2 speeds.")
    stopped, few = _timing_notes(Settings(), made_up())
    assert "after 120 s with 2 of 5 rounds" in stopped
    assert "Fewer than 5 rounds" in few


def test_rows_are_told_as_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row before the next policy is asked anything."""
    events: list[object] = []

    def measure(model: object, prompts: object, policy: object, **_: object) -> object:
        events.append(type(policy))
        return {"exact match": Score(1, 2)}

    monkeypatch.setattr("kvpolicy.evaluation.comparison.rows.measure_accuracy", measure)
    prompts = [Prompt(tuple(random_tokens(0, 20)), ((1,),))]
    model = tiny_model("llama", seed=3)
    chosen = variants(["snapkv"], [0.3])
    compare(
        model,
        prompts,
        chosen,
        rounds=1,
        new_tokens=1,
        row_done=lambda row: events.append(row.variant.label),
    )
    assert events == [FullContext, "full_context", type(SnapKV()), "snapkv 0.3"]


def test_another_model_is_timed_at_one_budget() -> None:
    """Bytes are those of the timed model's prompt; what is not timed says nothing of them."""
    model = tiny_model("llama", seed=3)
    prompts = [Prompt(tuple(random_tokens(0, 20)), ((1,),))]
    chosen = variants(["snapkv"], [0.2, 0.5])
    assert timed_labels(chosen) == ["snapkv 0.2"]
    found = compare(
        model,
        prompts,
        chosen,
        rounds=1,
        new_tokens=1,
        timed=random_llama(3, 70),
        timed_labels=timed_labels(chosen),
    )
    data = found.as_data()
    full, low, high = data["rows"]
    assert (data["timed_tokens"], data["timed_model"]) == (70, "a random Llama of 3 layers")
    assert data["processor_time"] is True
    assert full["kv_bytes"]["full"] == 70 * 3 * 2 * 2 * 32 * 4
    assert low["tokens"] == {"seen": 70, "kept": 14.0}
    assert [high[name] for name in ("tokens", "kv_bytes", "prefill", "decode")] == [None] * 4
    (line,) = Shown.of(data).lines[1:]
    assert [budget.words for budget in line.right] == ["20%", "50%"]
    assert line.share == 0.2


def row_of(name: str, rate: float | None, right: int, speeds: tuple[float, float]) -> Any:
    """A row of a file of results, of 100 prompts."""
    prefill, decode = ({"rounds_speedup": [speed] * 5, "rounds_ms": [1] * 5} for speed in speeds)
    share = 1.0 if rate is None else rate
    return {
        "policy": name,
        "retention_rate": rate,
        "retention_tokens": None,
        "exact_match": {"all": {"matches": right, "count": 100}},
        "tokens": {"seen": 1000, "kept": 1000 * share},
        "kv_bytes": {"held": round(1000 * share), "full": 1000, "share": share},
        "prefill": prefill,
        "decode": decode,
    }


def results(*rows: Any) -> dict[str, Any]:
    full = row_of("full_context", None, 100, (1.0, 1.0))
    return {"timed_tokens": 1000, "rows": [full, *rows]}


def test_lines_are_sorted_by_accuracy_and_then_by_speed() -> None:
    shown = Shown.of(
        results(
            *(row_of("slow", rate, 80, (1.0, 1.0)) for rate in (0.02, 0.05)),
            *(row_of("bad", rate, 10, (9.0, 9.0)) for rate in (0.02, 0.05)),
            *(row_of("fast", rate, 80, (2.0, 1.0)) for rate in (0.02, 0.05)),
            row_of("whole", None, 90, (1.0, 1.0)),
        )
    )
    assert [line.name for line in shown.lines] == ["full_context", "whole", "fast", "slow", "bad"]
    assert [each.words for each in shown.budgets] == ["2%", "5%"]
    assert shown.budget == Budget(0.05)
    assert shown.lines[1].right == {Budget(0.02): 0.9, Budget(0.05): 0.9}


def test_sentences_say_what_the_lines_show() -> None:
    shown = Shown.of(
        results(
            *(row_of("good", rate, 97, (2.0, 3.0)) for rate in (0.02, 0.05)),
            row_of("bad", 0.02, 10, (9.0, 9.0)),
            row_of("bad", 0.05, 50, (9.0, 9.0)),
        )
    )
    assert sentences(shown) == [
        "It matters which tokens are kept: keeping 2% of a prompt's tokens, good answers 97% of "
        "the prompts right and bad 10%.",
        "At 5%, 1 of 2 policies answers as many right as full context (100%, or at most 5 points "
        "less) with 5% of its cache.",
        "Fastest of these is good: it reads the prompt 2.0 times as fast as full context and "
        "decodes 3.0 times as fast.",
    ]


def test_sentences_say_nothing_that_the_lines_do_not_show() -> None:
    """No difference beyond chance, no policy as good as full context, no gain, no speed."""
    alike = Shown.of(results(*(row_of(name, 0.1, 60, (1.0, 1.0)) for name in "ab")))
    assert sentences(alike) == [
        "Keeping 10% of a prompt's tokens, every policy answers 60% of the 100 prompts right.",
        "At 10% no policy comes within 5 points of full context's 100%; a, b have 60%.",
        "Speed: none of them reads the prompt much faster than full context; none decodes much "
        "faster; the prompts may be too short for that.",
    ]
    near = Shown.of(results(*(row_of(str(right), 0.1, right, (1.0, 1.0)) for right in (60, 65))))
    assert sentences(near)[0] == (
        "Keeping 10% of a prompt's tokens, policies answer 60% to 65% of 100 prompts right: too "
        "few prompts to tell them apart."
    )
    slow = row_of("a", 0.1, 100, (1.0, 2.5))
    assert "a decodes 2.5 times as fast" in sentences(Shown.of(results(slow)))[2]
    slow["prefill"]["rounds_speedup"] = [1.0]
    assert sentences(Shown.of(results(slow)))[2] == "Speed: a decodes 2.5 times as fast."
    slow["decode"]["rounds_speedup"] = [1.0]
    assert sentences(Shown.of(results(slow)))[2].startswith("No speed can be relied on")
    fast = row_of("a", 0.1, 100, (2.0, 2.5))
    fast["decode"]["rounds_speedup"] = [1.0]
    assert sentences(Shown.of(results(fast)))[2] == (
        "Fastest of these is a: it reads the prompt 2.0 times as fast as full context."
    )
    assert sentences(Shown.of(results())) == []


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


def pixels(picture: bytes) -> Any:
    return image.imread(BytesIO(picture))


def coloured(found: Any) -> float:
    """The share of the pixels that are not grey."""
    return float((found[..., :3].max(axis=-1) - found[..., :3].min(axis=-1) > 0.1).mean())


@pytest.mark.parametrize("kinds", [["exact match"], ["one-hop", "two-hop"]])
def test_the_picture_of_a_sweep(kinds: list[str]) -> None:
    scores = {kind: Score(1, 2) for kind in kinds}
    sweep = Sweep({0.1: (scores, scores), 0.2: (scores, scores)}, scores)
    drawn = pixels(plot_sweep(sweep))
    assert drawn.shape[:2] == (630, 150 * (1 + 4 * len(kinds)))
    assert coloured(drawn) > 0.001


def test_the_picture_of_a_comparison_has_a_row_for_each_policy() -> None:
    data = made_up().as_data()
    full, snap = data["rows"]
    other = {**snap, "policy": "other"}
    two = pixels(plot_comparison(data))
    # A second rate is a column, another policy a row.
    rates = pixels(plot_comparison({**data, "rows": [full, snap, {**snap, "retention_rate": 0.3}]}))
    policies = pixels(plot_comparison({**data, "rows": [full, snap, other]}))
    assert rates.shape == two.shape
    assert policies.shape[0] > two.shape[0]
    assert policies.shape[1] == two.shape[1]
    chosen = plot_comparison({**data, "rows": [full, snap, other]}, ["streamingllm"])
    assert pixels(chosen).shape == two.shape
    # Two numbers of tokens are two columns.
    tokens = [{**snap, "retention_rate": None, "retention_tokens": kept} for kept in (9, 18)]
    assert pixels(plot_comparison({**data, "rows": [full, *tokens]})).shape == rates.shape
    assert coloured(two) > 0.02
    assert coloured(pixels(plot_comparison({**data, "rows": [full]}))) > 0.01


def test_the_picture_says_what_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    said: list[str] = []
    write_text = Axes.text

    def text(axes: Axes, x: float, y: float, words: str, **look: Any) -> Any:
        said.append(words)
        return write_text(axes, x, y, words, **look)

    monkeypatch.setattr(Axes, "text", text)
    plot_comparison(with_rounds((1000.0,) * 5, (2000.0,) * 5).as_data())
    assert said == ["94", "18", "100.0", "10.0", "1.00", "2.00", "1.00", "1.00"]
    plot_comparison(made_up().as_data())
    assert said[-4:] == ["1.00", "-", "1.00", "-"]


def test_study_on_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers on the screen are those in the file, and the screen is 80 columns wide."""
    settings = Settings(
        context=128,
        count=6,
        policies=PolicyOptions(names=("fastkv", "snapkv", "pyramidinfer"), rates=(0.1, 0.3)),
        speed_context=96,
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
    lines = {line.split()[0]: line.split()[1:] for line in table_of(study.comparison)[2:]}
    assert next(iter(lines)) == "full_context"
    assert {row["policy"] for row in data["rows"]} == set(lines)
    for row in data["rows"]:
        cells = lines[row["policy"]]
        rate = row["retention_rate"]
        scores = row["exact_match"].values()
        right = sum(score["matches"] for score in scores) / sum(each["count"] for each in scores)
        assert cells[0 if rate is None else [0.1, 0.3].index(rate)] == f"{100 * right:.0f}"
        if rate == 0.3:
            assert row["prefill"] is None
            continue
        assert cells[3] == f"{100 * row['kv_bytes']['share']:.1f}"
        assert cells[4:] == ["-", "-"] if row["policy"] != "full_context" else ["1.00", "1.00"]
        token_bytes = row["kv_bytes"]["held"] - row["kv_bytes"]["padding"]
        assert token_bytes == pytest.approx(row["tokens"]["kept"] * 6 * 2 * 2 * 32 * 4)
    wanted = {"rates": [0.1, 0.3], "count": 6, "rounds": 2, "timing_seconds": None}
    assert wanted.items() <= data["settings"].items()
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
        variants(["streamingllm"], rates=[0.05]),
        rounds=1,
        new_tokens=1,
    )
    full, recent = (sum(score.matches for score in row.scores.values()) for row in found.rows)
    assert full >= 12
    assert recent <= full // 2


def test_no_prompts_are_counted_beside_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--count must be left out with --prompts-file, got 4"):
        Settings(prompts=tmp_path / "questions.jsonl", count=4)


def test_a_model_that_answers_nothing_compares_nothing() -> None:
    found = results(row_of("a", 0.05, 0, (2.0, 2.0)))
    found["rows"][0]["exact_match"]["all"]["matches"] = 0
    (said,) = sentences(Shown.of(found))
    assert said.startswith("Full context answers 0% of the prompts right. The model cannot")
