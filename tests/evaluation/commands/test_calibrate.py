"""`kvpolicy calibrate`: what it prints, draws and writes, and what it says of bad input."""

import json
import sys
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest
import torch
from matplotlib import image

from kvpolicy.evaluation import (
    Calibration,
    LayerDistance,
    TSPDistances,
    load,
    measure_tsp_distances,
    needle_prompts,
)
from kvpolicy.evaluation.comparison.plots import plot_calibration
from kvpolicy.evaluation.comparison.tables import calibration_legend
from tests.evaluation.support import Run, fails

SMALL = ("--context", 128, "--count", 3, "--threads", 1)


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "calibrate")


def test_screen_and_file_say_the_same(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    status, shown, err = run(*SMALL, "--max-layer", 3, "--out", out)
    assert (status, err.strip()) == (0, "")
    *lines, _ = shown.splitlines()  # the last one names a folder as long as it is
    assert max(map(len, lines)) <= 80
    data = json.loads((out / "calibrate.json").read_text())
    rows = [line.split() for line in shown.splitlines()[1:5]]
    assert rows == [
        [
            str(layer),
            f"{100 * each['compute_rate']:.1f}",
            *(f"{each[name]:.3g}" for name in ("squared", "normalised", "worst")),
        ]
        for layer, each in enumerate(data["layers"])
    ]
    best = min(range(4), key=lambda layer: data["layers"][layer]["squared"])
    assert data["tsp_layer"] == best
    assert f"TSP layer {best}: the smallest distance of layers 0 to 3." in shown
    assert data["seed"] not in (0, 1000)  # those of compare and its sweep
    assert data["input_lengths"] == [128] * 3
    assert data["model"] == "needle"
    assert data["machine"]["threads"] == 1
    assert sorted(path.name for path in out.iterdir()) == ["calibrate.json", "calibrate.png"]
    assert image.imread(out / "calibrate.png").std() > 0.05  # not blank
    prompts = needle_prompts(128, 3, data["seed"])
    again = measure_tsp_distances(
        load().model, [torch.tensor(each.input_ids) for each in prompts], max_layer=3
    )
    assert data["layers"][1]["squared"] == pytest.approx(again.layers[1].squared, rel=1e-4)


def test_earliest_and_its_options(run: Run) -> None:
    earliest = (*SMALL, "--criterion", "earliest", "--tolerance", 100)
    status, shown, _ = run(*earliest, "--tsp-rate", 0.5)
    assert status == 0
    assert "TSP layer 0: the earliest with a normalised distance of at most 100." in shown
    assert "TSP rate 0.5" in shown
    assert len(shown.split("\n\n")[0].splitlines()) == 1 + 3  # layers 0 to 6 // 2 - 1


def test_a_tolerance_out_of_reach(run: Run, tmp_path: Path) -> None:
    """The table is shown all the same, and nothing is written."""
    out = tmp_path / "out"
    arguments = ("--criterion", "earliest", "--tolerance", 1e-12, "--out", out)
    status, shown, err = run(*SMALL, *arguments)
    assert status == 1
    assert shown.startswith("TSP layer")
    assert f"error: no TSP layer is chosen; nothing is written to {out}: tolerance" in err
    assert "tolerance must be reached by a TSP layer up to max_layer 2" in err
    assert not out.exists()


def test_prompts_of_a_file(run: Run, tmp_path: Path) -> None:
    """Their tokens are read, their answers are not."""
    file = tmp_path / "prompts.jsonl"
    text = load().tokenizer.decode(list(needle_prompts(128, 2, 7)[0].input_ids))
    file.write_text(json.dumps({"prompt": text, "answer": "f1"}) + "\n")
    status, shown, _ = run("--prompts-file", file, "--threads", 1, "--out", tmp_path / "out")
    assert status == 0
    assert "mean over 1 prompt of 128 tokens" in shown
    data = json.loads((tmp_path / "out" / "calibrate.json").read_text())
    assert data["prompts"] == str(file)
    assert "seed" not in data
    file.write_text('{"prompt": "f1 f2", "answer": "f1"}\n')
    said = "calibration_inputs[0] must be longer than window_size, 8 tokens, got 2"
    fails(run("--prompts-file", file, "--threads", 1, "--out", tmp_path / "never"), 1, said)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--tsp-rate", "0"], 1, "tsp_rate must be in (0, 1], got 0.0"),
        (["--tsp-rate", "nan"], 1, "tsp_rate must be in (0, 1], got nan"),
        (["--criterion", "best"], 1, "criterion must be one of argmin, earliest, got 'best'"),
        (["--tolerance", "0"], 1, "tolerance must be above 0 and finite"),
        (["--max-layer", "6"], 1, "max_layer must be in [0, 5] for a model of 6 layers, got 6"),
        (["--max-layer", "-1"], 2, "Invalid value for '--max-layer'"),
        (["--context", "63"], 2, "Invalid value for '--context'"),
        (["--count", "1"], 2, "Invalid value for '--count'"),
        (["--threads", "100000"], 1, "threads must be at most the machine's"),
        (["--threads", "0"], 2, "Invalid value for '--threads'"),
        (["--prompts-file", "no-such.jsonl"], 1, "prompts file no-such.jsonl does not exist"),
        (["--model", "some/model"], 1, "--prompts-file must be given with --model some/model"),
        (["--dtype", "int7"], 1, "dtype must be one of auto"),
        (["--out", __file__], 1, "out must be a folder"),
    ],
)
def test_bad_input(run: Run, tmp_path: Path, arguments: list[str], status: int, said: str) -> None:
    out = () if "--out" in arguments else ("--out", tmp_path / "out")
    fails(run(*arguments, *out), status, said)
    assert not (tmp_path / "out").exists()


def test_pictures_need_matplotlib(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = "matplotlib is not installed; get it with: pip install 'kvpolicy[plot]'"
    fails(run("--out", tmp_path / "out"), 1, said)


def made_up(*normalised: float, criterion: str = "earliest") -> Calibration:
    layers = (LayerDistance(i, 0.5, part, part, 2 * part) for i, part in enumerate(normalised))
    return Calibration(0, TSPDistances(tuple(layers), 40, 0.2, (64, 1024)), criterion, 0.01)


@pytest.mark.parametrize(
    "calibration",
    [
        made_up(0.5, 0.01, 0.0),
        made_up(0.0),  # nothing to draw on a logarithmic axis
        made_up(*(1.0 / (1 + i) for i in range(40)), criterion="argmin"),
    ],
)
def test_pictures_of_all_sizes(calibration: Calibration) -> None:
    pixels = image.imread(BytesIO(plot_calibration(calibration)))
    assert pixels.shape[:2] == (630, 840)


def test_the_legend_names_the_lengths() -> None:
    legend = " ".join(calibration_legend(made_up(0.5).distances))
    assert "mean over 2 prompts of 64 to 1,024 tokens" in legend
