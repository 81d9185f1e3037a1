"""The frame of the benchmarks: options, turns, tables, and files that grow as the work goes on."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, harness, kvpress, methods, overhead
from benchmarks.harness import Benchmark, Column, Option, Run, Table, in_turns

TABLE = Table(
    "rows",
    Column("name", -6, "name"),
    Column("x", 6, lambda row: row["x"] / 2, ".2f"),
    Column("known", 7, "known"),
    instead=lambda row: "failed" if "x" not in row else None,
)
OPTIONS = (
    Option("contexts", [64, 128], quick=[8]),
    Option("rounds", 3),
    Option("names", ("a", "b")),
    Option("policy"),
    Option("fast", False),
)


def measured(run: Run) -> None:
    run.begin({"rounds": run.options.rounds}, "rows", "other")
    run.add("rows", {"name": "a", "x": 3})
    run.add("other", {"y": 1})
    run.add("rows", {"name": "b"}, {"name": "c", "x": 5, "known": 7})


def benchmark(measure: Any = measured, **how: Any) -> Benchmark:
    return Benchmark("tried", "A benchmark.", measure, OPTIONS, (TABLE,), "Notes.", **how)


def test_options_have_defaults_and_those_of_a_quick_run() -> None:
    options = benchmark().options_of([])
    assert (options.contexts, options.rounds, options.names) == ([64, 128], 3, ("a", "b"))
    assert (options.policy, options.fast, options.threads) == (None, False, 2)
    assert benchmark().options_of(["--quick"]).contexts == [8]
    given = ["--quick", "--contexts", "32,16", "--rounds", "5", "--names", "c", "--fast"]
    options = benchmark(threads=1).options_of(given)
    assert (options.contexts, options.rounds, options.names) == ([16, 32], 5, ("c",))
    assert (options.fast, options.threads) == (True, 1)
    with pytest.raises(SystemExit):
        benchmark().options_of(["--rounds", "0"])


def test_options_are_completed_last() -> None:
    def settle(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        options.total = options.rounds * len(options.contexts)

    assert benchmark(settle=settle).options_of(["--rounds", "4"]).total == 8


@pytest.mark.parametrize(
    ("rotate", "warm_up", "order"),
    [(True, True, "ab ba ab"), (False, True, "ab ab ab"), (True, False, "ba ab")],
)
def test_contenders_take_turns(rotate: bool, warm_up: bool, order: str) -> None:
    calls: list[str] = []

    def turn(name: str) -> Any:
        return lambda: calls.append(name) or len(calls)

    taken = in_turns({"a": turn("a"), "b": turn("b")}, 2, rotate=rotate, warm_up=warm_up)
    assert "".join(calls) == order.replace(" ", "")
    counted = calls[2:] if warm_up else calls
    for name, found in taken.items():
        first = len(calls) - len(counted) + 1
        assert found == [first + at for at, each in enumerate(counted) if each == name]


def test_a_run_is_written_as_it_goes_on_and_shown_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    seen: list[list[int]] = []

    def watched(run: Run) -> None:
        add = run.add

        def noting(part: str, *rows: Any) -> None:
            add(part, *rows)
            record = json.loads((tmp_path / "tried.json").read_text())
            seen.append([len(record["rows"]), len(record["other"])])

        run.add = noting  # type: ignore[method-assign]
        measured(run)

    benchmark(watched).main(["--threads", "1", "--out", str(tmp_path)])
    torch.set_num_threads(threads)
    assert seen == [[1, 0], [1, 1], [3, 1]]
    shown = capsys.readouterr().out
    assert shown.splitlines() == [
        "name       x  known",
        "a       1.50      -",
        "failed",
        "c       2.50      7",
        "Notes.",
    ]
    record = json.loads((tmp_path / "tried.json").read_text())
    assert list(record) == ["benchmark", "settings", "versions", "machine", "rows", "other"]
    assert (record["benchmark"], record["settings"]) == ("tried", {"rounds": 3})
    assert record["machine"]["threads"] == 1
    benchmark().main(["--show", str(tmp_path / "tried.json"), "--threads", "7"])
    assert capsys.readouterr().out == shown
    assert torch.get_num_threads() == threads  # nothing is measured


def test_a_picture_is_drawn_of_what_was_measured_and_of_what_is_shown(tmp_path: Path) -> None:
    drawn: list[int] = []

    def picture(record: dict[str, Any]) -> bytes:
        drawn.append(len(record["rows"]))
        return b"picture"

    subject = benchmark(picture=picture)
    subject.main(["--threads", "1", "--out", str(tmp_path)])
    assert (tmp_path / "tried.png").read_bytes() == b"picture"
    (tmp_path / "tried.png").unlink()
    subject.main(["--show", str(tmp_path / "tried.json")])
    assert (tmp_path / "tried.png").read_bytes() == b"picture"
    assert drawn == [3, 3]


@pytest.mark.parametrize("bad", ["", "a", "8,x", "0", "8,-1", "1.5"])
def test_bad_lists_of_numbers(bad: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="whole numbers of at least 1"):
        harness.whole_numbers(bad)


def test_lists_of_numbers_are_sorted_and_unique() -> None:
    assert harness.whole_numbers("512,64,512") == [64, 512]


def test_quick_results_go_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parser = harness.parser_of("A benchmark.")
    assert harness.out_folder(parser.parse_args([])) == harness.RESULTS
    assert harness.out_folder(parser.parse_args(["--quick"])) != harness.RESULTS
    shown = parser.parse_args(["--show", str(tmp_path / "old" / "gpu.json")])
    assert harness.out_folder(shown) == tmp_path / "old"
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="out must be a folder"):
        harness.out_folder(parser.parse_args(["--out", str(tmp_path / "file")]))


@pytest.mark.parametrize(
    ("start", "arguments", "message"),
    [
        (gpu.main, "--quick --policies fastkv,snap", "--policies must be among full_context"),
        (gpu.main, "--quick --parts cells,loops", "--parts must be among cells, answers"),
        (gpu.main, "--quick --minutes 0", "--minutes must be above 0"),
        (gpu.main, "--quick --new-tokens 1", "at least 2"),
        (gpu.main, "--quick --contexts 0", "at least 1"),
        (methods.main, "--quick --methods fastkv,snap", "--methods must be among"),
        (methods.main, "--quick --rounds 0", "at least 1"),
        (methods.main, "--quick --memory-context -1", "at least 0"),
        (overhead.main, "--quick --policies SnapKV,Snap", "must be among FullContext,"),
        (kvpress.options_of, "--kvpress-python /no/python", "`make bench-kvpress` builds one"),
    ],
)
def test_bad_options_of_benchmarks(
    start: Any, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        start(arguments.split())
    assert message in capsys.readouterr().err
