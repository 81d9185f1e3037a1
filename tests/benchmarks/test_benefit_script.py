"""The README's picture: which numbers of a result it shows."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import benefit
from benchmarks.common import read_json


def cell(policy: str, context: int, seconds: list[float], held: int, peak: int) -> dict[str, Any]:
    return {
        "policy": policy,
        "context": context,
        "status": "measured",
        "prefill_ms": [1000 * each for each in seconds],
        "held_bytes": held,
        "prefill_peak_bytes": peak,
        "before_bytes": 100,
    }


RECORD: dict[str, Any] = {
    "machine": {"gpu": "A GPU"},
    "cells": [
        cell("full_context", 8192, [1.0], 1, 1),
        cell("full_context", 131072, [5.0, 4.0, 9.0], 4000, 1100),
        cell("snapkv", 131072, [1.0], 1, 1),
        cell("fastkv", 131072, [2.0, 3.0], 500, 350),
    ],
}


def test_medians_and_bytes_beyond_the_weights() -> None:
    found = benefit.benefit(RECORD)
    assert found == benefit.Benefit("A GPU", (5.0, 2.5), (4000, 500), (1000, 250))
    assert benefit.figures(found) == "A GPU: 5, 2.5; 4000, 500; 1000, 250"


def test_what_was_not_measured_is_not_shown() -> None:
    skipped = {**RECORD["cells"][-1], "status": "skipped"}
    with pytest.raises(KeyError, match="fastkv"):
        benefit.benefit({**RECORD, "cells": [*RECORD["cells"][:-1], skipped]})


def test_the_picture_carries_its_figures(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(RECORD))
    benefit.main([str(tmp_path / "gpu.json"), "--out", str(tmp_path / "made" / "it.png")])
    with Image.open(tmp_path / "made" / "it.png") as picture:
        assert picture.info["Description"] == benefit.figures(benefit.benefit(RECORD))
        assert picture.width > 1200


def test_the_committed_picture_is_of_the_committed_result() -> None:
    with Image.open(benefit.PICTURE) as picture:
        found = benefit.benefit(read_json(benefit.RESULT))
        assert picture.info["Description"] == benefit.figures(found)
