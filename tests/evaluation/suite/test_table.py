"""The table of a folder, on cells whose numbers are worked out by hand."""

import pytest

from kvpolicy.evaluation.intervals import paired_difference, share_interval
from kvpolicy.evaluation.suite.folder import Cell, Sample
from kvpolicy.evaluation.suite.table import csv_text, lines_of, markdown, rows_of


def cell(method: str, scores: dict[int, float], task: str = "t", length: int | None = 64) -> Cell:
    """Samples by document, which cost 100 tokens, of which the document's number is kept."""
    samples = [
        Sample(
            number, f"prompt {number}", [""], {"f1": score}, 100, number, 10**6, 0.5, 1.0 + number
        )
        for number, score in scores.items()
    ]
    return Cell(task, length, False, method, "", tuple(samples))


def test_scores_intervals_and_pairs() -> None:
    full = cell("full_context", {0: 1.0, 1: 1.0, 2: 0.0, 3: 0.5})
    small = cell("snapkv 0.1", {0: 1.0, 1: 0.0, 2: 0.5})
    first, second = rows_of([full, small])
    assert (first["n"], first["score"], first["pairs"], first["difference"]) == (4, 62.5, 0, None)
    assert (first["low"], first["high"]) == pytest.approx(
        tuple(100 * each for each in share_interval(0.625, 4))
    )
    assert (second["n"], second["score"], second["pairs"]) == (3, 50.0, 3)
    wanted = paired_difference([1.0, 0.0, 0.5], [1.0, 1.0, 0.0])
    assert second["difference"] == pytest.approx(100 * (0 - 1 + 0.5) / 3)
    assert second["difference_low"] == pytest.approx(100 * wanted.low)
    assert second["difference_high"] == pytest.approx(100 * wanted.high)
    assert (second["tokens_kept"], second["total_seconds"]) == (1.0, 2.0)


def test_documents_of_other_prompts_are_no_pairs() -> None:
    full, small = cell("full_context", {0: 1.0}), cell("snapkv 0.1", {5: 0.0})
    assert [row["pairs"] for row in rows_of([full, small])] == [0, 0]
    assert [row["pairs"] for row in rows_of([small])] == [0]


def test_scores_of_up_to_100() -> None:
    full, small = cell("full_context", {0: 80.0, 1: 1.0}), cell("snapkv 0.1", {0: 1.0, 1: 0.0})
    rows = rows_of([full, small, cell("full_context", {0: 1.0}, task="other")])
    assert [row["score"] for row in rows] == pytest.approx([40.5, 0.5, 100.0])
    assert rows[1]["difference"] == pytest.approx(-40.0)


def test_what_is_written() -> None:
    cells = [cell("full_context", {0: 1.0, 1: 1.0}), cell("snapkv 0.1", {0: 1.0, 1: 0.0})]
    rows = rows_of([*cells, cell("full_context", {0: 1.0}, "own", None)])
    lines = lines_of(rows)
    assert lines[:5] == [
        "policy       n     score [95%]     to full [95%] KV MB prefill s",
        "",
        "t, 64 tokens: f1",
        "full_context 2 100.0 [34, 100]                       1       0.5",
        "snapkv 0.1   2    50.0 [9, 91] -50.0 [-100, +56]     1       0.5",
    ]
    assert lines[5:8] == [
        "",
        "own: f1",
        "full_context 1 100.0 [21, 100]                       1       0.5",
    ]
    assert (
        "| t, 64 tokens | snapkv 0.1 | 2 | 50.0 [9, 91] | -50.0 [-100, +56] | 1 | 0.5 |"
        in markdown(rows)
    )
    text = csv_text(rows).splitlines()
    assert text[0].startswith("task,length,later,policy,metric,n,score,low,high,pairs,difference,")
    assert text[3].startswith("own,,False,full_context,f1,1,100.0,")
    assert ",0,,,,100.0,0.0,1000000.0,0.5,1.0" in text[3]


def test_the_order_of_rows() -> None:
    labels = ["full_context", "fastkv@3 0.1", "snapkv 0.02", "snapkv 0.1", "snapkv 2048 tokens"]
    cells = [cell(label, {0: 1.0}, length=length) for length in (64, 512) for label in labels]
    cells.reverse()
    ordered = sorted(cells, key=lambda each: each.order)
    cells.reverse()
    assert [(each.length, each.method) for each in ordered] == [
        (each.length, each.method) for each in cells
    ]
    assert len({each.file for each in cells}) == len(cells)
