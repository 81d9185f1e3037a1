"""The scaling benchmark: exponents by hand, the axes, and a quick run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scaling
from benchmarks.fits import exponent, fits_of, table
from benchmarks.scaling import METHODS, Point, points_of


@given(
    st.floats(-2.0, 3.0),
    st.floats(1e-3, 1e3),
    st.lists(st.integers(1, 10**6), min_size=2, max_size=6, unique=True),
)
def test_a_power_has_its_exponent(power: float, scale: float, at: list[int]) -> None:
    found = exponent(at, [scale * place**power for place in at])
    assert found == pytest.approx(power, abs=1e-4)


def test_exponent_of_points_off_the_line() -> None:
    """Logarithms to base 2: places 0, 1, 2; values 0, 3, 2; slope ((-1)(0) + (1)(2)) / 2 = 1."""
    assert exponent([1, 2, 4], [1, 8, 4]) == pytest.approx(1.0)


@pytest.mark.parametrize("at", [[], [8], [8, 8]])
def test_one_place_has_no_exponent(at: list[int]) -> None:
    assert exponent(at, [1.0] * len(at)) is None


def row(axis: str, at: int, policy: str, prefill_ms: list[float], peak: int | None) -> Any:
    return {
        "axis": axis,
        "at": at,
        "policy": policy,
        "prefill_ms": prefill_ms,
        "prefill_cpu_ms": [2.0],
        "prefill_flops": at,
        "decode_ms": [3.0, 1.0, 2.0],
        "held_bytes": 4 * at,
        "peak": None if peak is None else {"growth_bytes": peak},
    }


def test_fits_are_of_medians_by_axis_and_method() -> None:
    rows = [
        row("context", 2, "fastkv", [1.0, 4.0, 900.0], 10),
        row("context", 4, "fastkv", [16.0], 10),
        row("context", 2, "snapkv", [7.0], None),
        row("context", 4, "snapkv", [7.0], 10),
        row("batch", 4, "fastkv", [7.0], 10),
    ]
    fits = {(fit["axis"], fit["policy"], fit["quantity"]): fit for fit in fits_of(rows)}
    assert fits["context", "fastkv", "prefill time"]["exponent"] == pytest.approx(2.0)
    assert fits["context", "fastkv", "peak memory"]["exponent"] == pytest.approx(0.0)
    assert fits["context", "fastkv", "bytes held"]["exponent"] == pytest.approx(1.0)
    assert fits["context", "snapkv", "prefill time"]["exponent"] == pytest.approx(0.0)
    assert ("context", "snapkv", "peak memory") not in fits  # known at one place only
    assert not any(axis == "batch" for axis, _, _ in fits)
    lines = table(fits_of(rows)).splitlines()
    assert lines[0].split() == ["exponent", "of", "method", "context"]
    assert lines[1].split() == ["prefill", "time", "fastkv", "2.00"]
    assert [line.split()[:2] for line in lines[-1:]] == [["peak", "memory"]]


def test_along_an_axis_the_others_stay() -> None:
    fixed = Point("", context=5, batch=6, layers=7)
    assert points_of([1, 2], [3], [4], fixed) == [
        Point("context", 1, 6, 7),
        Point("context", 2, 6, 7),
        Point("batch", 5, 3, 7),
        Point("layers", 5, 6, 4),
    ]
    contexts = [point.at for point in scaling.REAL if point.axis == "context"]
    assert contexts == [2048 << step for step in range(6)]
    assert contexts[-1] == 65536


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quick")
    scaling.main(["--quick", "--threads", "1", "--no-memory", "--out", str(folder)])
    return folder


def test_quick_run_measures_every_point_and_fits(quick: Path) -> None:
    record = json.loads((quick / "scaling.json").read_text())
    assert list(record) == ["benchmark", "settings", "versions", "machine", "points", "fits"]
    rows = record["points"]
    assert [(each["axis"], each["at"], each["policy"]) for each in rows] == [
        (point.axis, point.at, name) for point in scaling.QUICK for name in METHODS
    ]
    for each in rows:
        assert len(each["prefill_ms"]) == len(each["decode_ms"]) == 1
    slopes = {
        (fit["axis"], fit["policy"]): fit["exponent"]
        for fit in record["fits"]
        if fit["quantity"] == "bytes held"
    }
    for axis in ("context", "batch", "layers"):
        assert slopes[axis, "dynamic_cache"] == pytest.approx(1.0)
    # Of 64 and 128 tokens SnapKV keeps its window of 8 and int(0.1 * 128) = 12.
    assert slopes["context", "snapkv"] == pytest.approx(math.log2(12 / 8))
    assert slopes["batch", "snapkv"] == slopes["layers", "snapkv"] == pytest.approx(1.0)
    counted = {
        (fit["axis"], fit["policy"]): fit["exponent"]
        for fit in record["fits"]
        if fit["quantity"] == "prefill operations"
    }
    assert counted["batch", "fastkv"] == pytest.approx(1.0)
    assert 1.0 < counted["context", "dynamic_cache"] < 2.0


def test_memory_is_asked_for_at_every_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, str, int, int, int]] = []

    def try_peak(spec: Any, policy: str, context: int, *, batch: int, threads: int) -> Any:
        asked.append((spec.num_layers, policy, context, batch, threads))
        return {"growth_bytes": context * batch * spec.num_layers}

    monkeypatch.setattr(scaling, "try_peak", try_peak)
    scaling.main(["--quick", "--threads", "1", "--out", str(tmp_path)])
    assert asked == [
        (point.layers, name, point.context, point.batch, 1)
        for point in scaling.QUICK
        for name in METHODS
    ]
    record = json.loads((tmp_path / "scaling.json").read_text())
    slopes = [fit["exponent"] for fit in record["fits"] if fit["quantity"] == "peak memory"]
    assert slopes == pytest.approx([1.0] * 3 * len(METHODS))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_can_be_shown_again(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (quick / "scaling.json").read_bytes()
    scaling.main(["--show", str(quick / "scaling.json"), "--threads", "1"])
    assert "bytes held          dynamic_cache         1.00" in capsys.readouterr().out
    assert (quick / "scaling.json").read_bytes() == before


def test_longer_prompts_can_be_left_out() -> None:
    assert scaling.points_for(scaling.options_of([])) == scaling.REAL
    points = scaling.points_for(scaling.options_of(["--max-context", "8192"]))
    assert [point.at for point in points if point.axis == "context"] == [2048, 4096, 8192]
    assert [point for point in points if point.axis != "context"] == scaling.REAL[6:]
    with pytest.raises(SystemExit):
        scaling.options_of(["--max-context", "0"])
