"""Tables of real models in the pages: as the file of results has them."""

import json

from benchmarks import real_tables

DATA = {
    "cells": {
        f"m t 9 {way}": {
            "prompts": 8,
            "times": {"full context": {"prefill_cpu": 1.0}, "a": {"prefill_cpu": 0.5}},
            "rows": [
                {
                    "policy": policy,
                    "kind": kind,
                    "score": score,
                    "log_prob": log_prob,
                    "held": 0.5,
                    "count": 5 if policy == "b 0.1" and way == "later" else 8,
                }
                for policy, score, log_prob in (
                    ("full context", 1.0, -0.5),
                    ("b 0.1", 0.25, -2.0),
                    ("b 0.2", 0.5, -1.0),
                    ("a 0.2", 0.75, -1.125),
                    ("own", 0.5, -1.5),
                )
                for kind in ("all", "word")
            ],
        }
        for way in ("known", "later")
    }
}


def test_tables_by_hand() -> None:
    assert real_tables.answers(DATA, "m", "t", "9").splitlines() == [
        "| policy | known, 10% | known, 20% | later, 10% | later, 20% | prefill time |",
        "| --- | --- | --- | --- | --- | --- |",
        "| full context | 100 | 100 | 100 | 100 | 1.00 |",
        "| `a` |  | 75 |  | 75 | 0.50 |",
        "| `b` | 25 | 50 | 25 | 50 |  |",
        "",
        "Prompts: 8 (known), 5 to 8 (later). Without a budget, known: `own` 50 (keeps 50%). "
        "Without a budget, later: `own` 50 (keeps 50%).",
    ]
    assert real_tables.kinds(DATA, "m", "t", "9", "0.2").splitlines()[2:] == [
        "| full context | 100 | 100 |",
        "| `a` | 75 | 75 |",
        "| `b` | 50 | 50 |",
    ]
    assert real_tables.lost(DATA, "m", "9", "0.2", "t").splitlines() == [
        "| policy | t, known | t, later |",
        "| --- | --- | --- |",
        "| `b` | 0.50 | 0.50 |",
        "| `a` | 0.62 | 0.62 |",
        "",
        "Prompts of each: 8, 5 to 8.",
    ]
    own = {
        f"smollm2 needles 1000 {way}": DATA["cells"][f"m t 9 {way}"] for way in ("known", "later")
    }
    assert real_tables.method({"cells": own}, "b").endswith(
        ", 10% / 20% kept: question known 25% / 50%, later 25% / 50%, full context 100%."
    )
    assert real_tables.method({"cells": own}, "own").endswith(
        ", 50% held: question known 50%, later 50%, full context 100%."
    )
    none = "<!-- real: answers m other 9 -->\n<!-- end -->"
    assert "Not measured yet" in real_tables.written(none, DATA)


def test_a_policy_has_its_place_by_what_was_measured() -> None:
    data = json.loads(json.dumps(DATA))
    known = data["cells"]["m t 9 known"]
    known["rows"] = [row for row in known["rows"] if row["policy"] != "a 0.2"]
    found = real_tables.lost(data, "m", "9", "0.2", "t").splitlines()
    assert found[2:4] == ["| `b` | 0.50 | 0.50 |", "| `a` |  | 0.62 |"]


def test_a_table_of_policies_as_one_writes_them() -> None:
    """Of a number at 10% and one at 20%; where one was not measured, its place is empty."""
    text = json.dumps(DATA).replace("m t 9", "m needles 9").replace("-1.125", "-0.496")
    for name, known in (('"a', '"replaykv_same'), ('"b', '"snapkv')):
        text = text.replace(f"{name} ", f"{known} ").replace(f'{name}"', f'{known}"')
    found = real_tables.kept(json.loads(text), "m", "9", "9", "snapkv", "replaykv_same")
    assert found.splitlines() == [
        "| policy | right %, known | right %, later "
        "| nats lost, known | nats lost, later | prefill |",
        "| --- | --- | --- | --- | --- | --- |",
        "| full context | 100 | 100 | 0.00 | 0.00 | 1.00 |",
        "| `SnapKV()` | 25 / 50 | 25 / 50 | 1.50 / 0.50 | 1.50 / 0.50 |  |",
        "| `ReplayKV(head_uniform=True)` |  / 75 |  / 75 |  / 0.00 |  / 0.00 | 0.50 |",
    ]


def test_a_page_is_filled_between_its_marks() -> None:
    page = "A\n<!-- real: lost m 9 0.1 t -->\nold\n<!-- end -->\nB\n"
    found = real_tables.written(page, DATA)
    assert found.startswith("A\n<!-- real: lost m 9 0.1 t -->\n\n| policy |")
    assert "| `b` | 1.50 | 1.50 |\n\nPrompts of each: 8, 5 to 8.\n\n<!-- end -->\nB\n" in found
    assert "old" not in found
    assert real_tables.written(found, DATA) == found


def test_pages_are_as_measured() -> None:
    data = json.loads(real_tables.RESULT.read_text())
    texts = {page.name: page.read_text(encoding="utf-8") for page in real_tables.PAGES}
    assert "<!-- real: " in texts["results.md"]
    assert [name for name, text in texts.items() if real_tables.written(text, data) != text] == []


def test_the_picture_is_drawn() -> None:
    data = json.loads(real_tables.RESULT.read_text())
    drawn = real_tables.picture(data, "smollm2", "needles", "1000")
    assert drawn.startswith(b"\x89PNG")
