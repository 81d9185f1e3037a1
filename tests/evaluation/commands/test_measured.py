"""`kvpolicy analyze` and `kvpolicy calibrate`: what they print, draw and write, and bad input."""

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import image

from kvpolicy.evaluation import (
    OutputDistances,
    Overlap,
    attention_recall,
    load,
    output_distances,
    topk_overlap,
    window_attention,
)
from kvpolicy.evaluation.analysis import plots
from kvpolicy.evaluation.analysis.plots import plot_analysis, plot_calibration
from kvpolicy.evaluation.tasks.needles import Needles
from tests.evaluation.support import Run, fails

MADE = ("--context", 700, "--count", 2, "--threads", 1)
COMMANDS = ("analyze", "calibrate")


def loaded_from(folder: Path, seed: int) -> tuple[Any, list[torch.Tensor]]:
    """The model, and the prompts that a command reads."""
    loaded = load(str(folder))
    asked = Needles().questions(loaded.tokenizer, 700, 2, seed)
    return loaded.model, [torch.tensor([*it.document_ids, *it.question_ids]) for it in asked]


def read(out: Path, name: str) -> Any:
    assert sorted(path.name for path in out.iterdir()) == [f"{name}.json", f"{name}.png"]
    assert image.imread(out / f"{name}.png").std() > 0.05  # not blank
    return json.loads((out / f"{name}.json").read_text())


def narrow(shown: str) -> list[list[str]]:
    """The words of each line, none of which is wider than 80 columns but the one with a folder."""
    *lines, _ = shown.splitlines()
    assert max(map(len, lines)) <= 80
    return [line.split() for line in lines]


def test_calibrate_shows_and_writes_what_is_measured(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    out, settings = tmp_path / "new" / "out", ("--set", "kernel_size=3", "--max-layer", 2)
    status, shown, err = run(*("calibrate", "--model", folder), *MADE, *settings, "--out", out)
    assert (status, err.strip()) == (0, "")
    data = read(out, "calibrate")
    model, inputs = loaded_from(folder, 2000)
    found = output_distances(model, inputs, max_layer=2, kernel_size=3, restart=False)
    assert [list(row.values()) for row in data["layers"]] == [
        pytest.approx(list(row), rel=1e-4) for row in found.by_layer
    ]
    assert narrow(shown)[1:4] == [
        [str(layer), f"{100 * rate:.1f}", *(f"{each:.3g}" for each in far)]
        for layer, rate, *far in (row.values() for row in data["layers"])
    ]
    assert data["tsp_layer"] == found.choose()
    assert f"TSP layer {found.choose()}: the smallest distance of layers 0 to 2." in shown
    assert f"mean over 2 prompts of {min(found.lengths)} to {max(found.lengths)} tokens" in shown
    assert data["parameters"] == {"kernel_size": 3}
    assert (data["task"], data["seed"]) == ("needles", 2000)  # not those of compare
    assert data["machine"]["threads"] == 1


def test_earliest_and_a_tolerance_out_of_reach(run: Run, folder: Path, tmp_path: Path) -> None:
    """Without a layer the table is shown all the same, and nothing is written."""
    arguments = ("calibrate", "--model", folder, *MADE, "--criterion", "earliest", "--tolerance")
    status, shown, _ = run(*arguments, 100, "--tsp-rate", 0.5)
    assert status == 0
    assert "TSP layer 0: the earliest with a normalised distance of at most 100." in shown
    assert "TSP rate 0.5" in shown
    out = tmp_path / "out"
    status, shown, err = run(*arguments, 1e-12, "--out", out)
    assert status == 1
    assert shown.startswith("TSP layer")
    assert f"error: no TSP layer is chosen; nothing is written to {out}: tolerance" in err
    assert "tolerance must be reached by a TSP layer up to max_layer 1" in err
    assert not out.exists()


def test_analyze_shows_and_writes_what_is_measured(run: Run, folder: Path, tmp_path: Path) -> None:
    arguments = ("analyze", "--model", folder, *MADE, "-k", 8, "--window-size", 6)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "analyze.json").write_text("of another run")
    status, shown, _ = run(*arguments, "--out", tmp_path / "out")
    assert status == 0
    data, (model, inputs) = read(tmp_path / "out", "analyze"), loaded_from(folder, 0)
    attention = [window_attention(model, each, 6) for each in inputs]
    one, other = (torch.tensor(topk_overlap(each, 8).pairs) for each in attention)
    assert data["overlap"]["pairs"] == [pytest.approx(row) for row in ((one + other) / 2).tolist()]
    assert data["overlap"]["chance"] == pytest.approx(sum(8 / len(each) for each in inputs) / 2)
    shares = [attention_recall(each, [2, 4, 8, 16, 32]) for each in attention]
    for k, held in data["recall"].items():
        means = [(a + b) / 2 for a, b in zip(*(each[int(k)] for each in shares), strict=True)]
        assert held == pytest.approx(means)
    distances = output_distances(model, inputs, max_layer=3, window_size=6)
    assert data["distances"]["layers"] == [0, 1, 2, 3]
    for way in ("propagated", "restarted"):
        for row, expected in zip(data["distances"][way], getattr(distances, way), strict=True):
            assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
    rows = narrow(shown)
    assert rows[1] == [
        *("0", f"{100 * data['overlap']['pairs'][0][1]:.1f}"),
        *(f"{100 * held[0]:.1f}" for held in data["recall"].values()),
        *(f"{sum(data['distances'][it][0]) / 2:.4f}" for it in ("propagated", "restarted")),
    ]
    assert rows[4][:2] == ["3", "-"]  # no next layer
    apart = next(row for row in rows if row[:2] == ["all", "layers"])
    assert apart[2] == f"{100 * data['overlap']['all layers'][1]:.1f}"


@pytest.mark.parametrize("command", COMMANDS)
def test_prompts_of_a_file(run: Run, folder: Path, tmp_path: Path, command: str) -> None:
    """Their tokens are read, their answers are not; --count takes the first ones."""
    file, text = tmp_path / "asked.jsonl", "They love the value. " * 20
    line = json.dumps({"context": text, "question": "What?", "answer": "x"})
    file.write_text(f"{line}\n" * 3)
    arguments = (command, "--model", folder, "--task", file, "--count", 2, "--threads", 1)
    status, shown, _ = run(*arguments, "--out", tmp_path / "out")
    assert status == 0
    data = read(tmp_path / "out", command)
    assert (data["task"], len(data["prompt_tokens"])) == (str(file), 2)
    assert f"2 prompts of {data['prompt_tokens'][0]} tokens" in " ".join(shown.split())


def test_prompts_as_text(run: Run, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.txt"
    file.write_text("They love the value in the list. " * 9)
    arguments = ("analyze", "--model", folder, "--prompt-file", file, "--prompt-file", file)
    lengths = []
    for chat in ("--chat", "--no-chat"):
        assert run(*arguments, "-k", 4, chat, "--out", tmp_path / chat)[0] == 0
        data = read(tmp_path / chat, "analyze")
        assert data["prompt_files"] == [str(file)] * 2
        lengths.append(data["prompt_tokens"])
    assert lengths[0][0] == lengths[0][1] > lengths[1][0]


@pytest.mark.parametrize("command", COMMANDS)
def test_pictures_that_fail(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Neither file is written; without matplotlib nothing is computed."""

    def fail(*arguments: Any) -> bytes:
        raise ValueError("no picture today")

    monkeypatch.setattr(
        plots, f"plot_{'analysis' if command == 'analyze' else 'calibration'}", fail
    )
    arguments = (command, "--model", folder, *MADE, "--out", tmp_path / "out")
    status, _, err = run(*arguments)
    assert (status, err.strip()) == (1, "error: no picture today")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fails(run(*arguments), 1, "matplotlib is not installed; get it with: pip install 'kvpolicy[plo")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_layers", [1, 2, 40])
def test_pictures_of_any_depth(num_layers: int) -> None:
    """No warning is raised, and what is drawn depends on the numbers."""
    row, layers = tuple(layer / num_layers for layer in range(num_layers)), tuple(range(num_layers))
    overlap = Overlap(8, layers, tuple(tuple(1 - abs(a - b) for b in row) for a in row))
    far = tuple((each, 2 * each) for each in row)
    near, farther = (
        OutputDistances(
            0.2, num_layers, layers, (9, 9), (1.0, 1.0), far, ((top, top),) * num_layers
        )
        for top in (0.5, 0.6)
    )
    drawn = [
        plot_analysis(overlap, 0.1, {8: row}, near),
        plot_analysis(overlap, 0.3, {8: row}, near),
        plot_analysis(overlap, 0.1, {8: tuple(1 - each for each in row)}, near),
        plot_analysis(overlap, 0.1, {8: row}, farther),
        plot_calibration(near, 0),
        plot_calibration(near, 0, 0.01),
    ]
    assert all(image.imread(BytesIO(picture)).std() > 0.01 for picture in drawn)
    assert len(set(drawn)) == len(drawn)
