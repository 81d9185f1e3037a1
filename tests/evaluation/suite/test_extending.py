"""A folder that is extended: what is there stays, what is missing is added, and no more."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvpolicy.evaluation.suite import Cell, Results, Summary, load, write_report
from kvpolicy.evaluation.suite.description import Description
from kvpolicy.evaluation.suite.filling import expected_samples, fill
from kvpolicy.evaluation.suite.folder import SAMPLES, SETTINGS, opened
from kvpolicy.evaluation.suite.runner import Documents
from kvpolicy.evaluation.suite.sample import Answer, Document, Method
from kvpolicy.evaluation.variant import variants
from tests.evaluation.suite.stand_in import StandIn

FIRST: dict[str, Any] = {
    "policies": ("snapkv",),
    "tasks": ("needle",),
    "lengths": (256,),
    "questions": ("with",),
    "limit": 3,
}
MORE: dict[str, dict[str, Any]] = {
    "policies": {"policies": ("snapkv", "fastkv")},
    "tasks": {"tasks": ("needle", "reading")},
    "lengths": {"lengths": (256, 512)},
    "questions": {"questions": ("with", "later")},
    "limit": {"limit": 7},
}


class Tasks(StandIn):
    """The stand-in's documents of some tasks; ids run through its lengths, as the harness's do."""

    def __init__(self, tasks: Sequence[str], lengths: Sequence[int], limit: int, stop: Any) -> None:
        super().__init__(lengths, limit, stop_after=stop)
        self.tasks = tasks

    def documents(self) -> Documents:
        found = {}
        for (task, length), documents in super().documents().items():
            if task in self.tasks:
                begin = self.count * len([place for place in found if place[0] == task])
                found[task, length] = [
                    attrs.evolve(it, id=begin + it.id, depth=it.id / 10) for it in documents
                ]
        return found

    def answer(self, cell: Cell, documents: Sequence[Document]) -> list[Answer]:
        return super().answer(cell, [attrs.evolve(it, id=it.id % self.count) for it in documents])


def description(runner: Tasks, asked: dict[str, Any], **settings: object) -> Description:
    chosen = variants(["full_context", *asked["policies"]], (0.1,))
    methods = {variant.label: Method.of(variant) for variant in chosen}
    expected = expected_samples(runner.documents(), asked["questions"], list(methods))
    environment = {"versions": {"kvpolicy": "1"}, "machine": {"processor": "made up", "cpus": 2}}
    content = {"model": "stand-in", "fingerprint": "f", "chat_template": False, "threads": 1}
    grows = {name: asked[name] for name in ("tasks", "lengths", "questions", "limit")}
    plain = json.loads(json.dumps({**content, **grows, **settings}))
    return Description(plain, environment, methods, expected)


def asked_of(
    folder: Path, asked: dict[str, Any], *, stop: int | None = None, **settings: object
) -> list[tuple[Cell, int]]:
    """Ask for some samples into a folder, and return what the model was asked."""
    runner = Tasks(asked["tasks"], asked["lengths"], asked["limit"], stop)
    try:
        with opened(folder, description(runner, asked, **settings)) as target:
            fill(target, runner, runner.documents(), batch_size=2)
    except KeyboardInterrupt:
        assert stop is not None
    return runner.asked


def rows(folder: Path) -> list[bytes]:
    return (folder / SAMPLES).read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("stop", [None, 1, 2])
@pytest.mark.parametrize("axis", MORE)
def test_extended_is_as_asked_at_once(tmp_path: Path, axis: str, stop: int | None) -> None:
    """Also where the first run, or the one that extends it, is killed in its midst."""
    both = FIRST | MORE[axis]
    asked_of(tmp_path / "once", both)
    folder = tmp_path / "extended"
    if stop is not None:
        asked_of(folder, FIRST, stop=stop)
    asked_of(folder, FIRST)
    before = rows(folder)
    assert len(before) == 2 * 3
    if stop is not None:
        asked_of(folder, both, stop=stop)
        assert rows(folder)[: len(before)] == before
    new = asked_of(folder, both)
    assert 0 < len(new) < len(rows(folder))
    assert rows(folder)[: len(before)] == before
    assert sorted(rows(folder)) == sorted(rows(tmp_path / "once"))
    assert len(set(rows(folder))) == len(rows(folder))
    assert load(folder).description == load(tmp_path / "once").description
    assert list(load(folder).description.expected) == list(
        load(tmp_path / "once").description.expected
    )
    assert asked_of(folder, both) == []
    assert asked_of(folder, FIRST) == []  # what the first run asked for is there
    assert len(rows(folder)) == len(rows(tmp_path / "once"))


def test_what_is_asked_for_alone_is_added(tmp_path: Path) -> None:
    """Naming the new policy alone gives the same as naming both, and asks full context no more."""
    asked_of(tmp_path / "once", FIRST | {"policies": ("snapkv", "fastkv")})
    asked_of(tmp_path / "by_one", FIRST)
    new = asked_of(tmp_path / "by_one", FIRST | {"policies": ("fastkv",)})
    assert {cell.method for cell, _ in new} == {"fastkv 0.1"}
    assert sorted(rows(tmp_path / "by_one")) == sorted(rows(tmp_path / "once"))
    assert load(tmp_path / "by_one").description == load(tmp_path / "once").description
    for name in ("by_one", "once"):
        write_report(load(tmp_path / name), tmp_path / f"{name}.html")
    table = (tmp_path / "by_one.md").read_text().replace("by_one", "once")
    assert table == (tmp_path / "once.md").read_text()


@pytest.fixture
def uneven(tmp_path: Path) -> Results:
    """SnapKV has one task with three samples, FastKV the other with three and this with seven."""
    asked_of(tmp_path / "results", FIRST)
    asked_of(tmp_path / "results", FIRST | {"policies": ("fastkv",), "limit": 7})
    asked_of(tmp_path / "results", FIRST | {"policies": ("fastkv",), "tasks": ("reading",)})
    return load(tmp_path / "results")


def test_no_more_is_asked_than_is_asked_for(uneven: Results) -> None:
    counts = {(cell.task, cell.method): n for cell, n in uneven.description.expected.items()}
    assert counts == {
        ("needle", "full_context"): 7,
        ("needle", "snapkv 0.1"): 3,
        ("needle", "fastkv 0.1"): 7,
        ("reading", "full_context"): 3,
        ("reading", "fastkv 0.1"): 3,
    }


def test_differences_are_of_the_samples_that_both_were_asked(uneven: Results) -> None:
    figures = Summary.of(uneven).figures
    snap = figures[Cell("needle", 256, "with", "snapkv 0.1")]
    assert (snap.done, snap.expected) == (3, 3)
    assert snap.difference is not None
    # Of every third document SnapKV knows nothing, full context of each.
    assert snap.difference.mean == pytest.approx(-100 / 3)
    assert snap.difference == paired([1, 1, 0])
    assert figures[Cell("needle", 256, "with", "fastkv 0.1")].difference == paired(
        [1, 0, 1, 0, 1, 0, 1]
    )


def paired(scores: list[float]) -> object:
    from kvpolicy.evaluation.suite import Difference, paired_difference

    found = paired_difference(scores, [1] * len(scores))
    return Difference(*(pytest.approx(100 * each) for each in attrs.astuple(found)))


def test_the_page_says_who_was_not_asked_what(uneven: Results, tmp_path: Path) -> None:
    results = attrs.evolve(
        uneven,
        description=attrs.evolve(
            uneven.description,
            expected={
                attrs.evolve(cell, length=256): count
                for cell, count in uneven.description.expected.items()
            },
        ),
        samples=tuple(
            attrs.evolve(each, cell=attrs.evolve(each.cell, length=256)) for each in uneven.samples
        ),
    )
    under = Summary.of(results).under(256, "with")
    assert {name: [each.expected for each in found] for name, found in under.items()} == {
        "full_context": [7, 3],
        "snapkv 0.1": [3, 0],
        "fastkv 0.1": [7, 3],
    }
    page, _ = write_report(results, tmp_path / "report.html")
    text = " ".join(page.read_text().split())
    assert "Not all methods were asked as many samples" in text
    assert "full_context 7, snapkv 0.1 3, fastkv 0.1 7" in text
    assert '<td class="open">not asked</td>' in text
    assert "not asked all tasks: snapkv 0.1" in text
    assert "Not finished" not in text


CHANGES: dict[str, object] = {"fingerprint": "g", "chat_template": True, "seed": 3, "threads": 2}


def test_all_that_differs_is_said_and_nothing_is_changed(tmp_path: Path) -> None:
    asked_of(tmp_path, FIRST)
    before = {name: (tmp_path / name).read_bytes() for name in (SAMPLES, SETTINGS)}
    more = FIRST | MORE["policies"]
    for change in ({each: CHANGES[each]} for each in CHANGES):
        with pytest.raises(ValueError, match="was") as error:
            asked_of(tmp_path, more, **change)
        assert str(error.value).count(" was ") == 1
    with pytest.raises(ValueError, match="out must be a new folder") as error:
        asked_of(tmp_path, more, **CHANGES)
    for said in (
        "fingerprint was f, got g",
        "chat_template was False, got True",
        "seed was not given, got 3",
        "threads was 1, got 2",
    ):
        assert said in str(error.value)
    assert "policies" not in str(error.value)
    assert before == {name: (tmp_path / name).read_bytes() for name in (SAMPLES, SETTINGS)}


def test_a_model_counts_by_its_content(tmp_path: Path) -> None:
    asked_of(tmp_path, FIRST)
    assert asked_of(tmp_path, FIRST | MORE["limit"], model="the same elsewhere")
    assert load(tmp_path).description.settings["model"] == "stand-in"


def test_a_policy_with_other_parameters_is_refused(tmp_path: Path) -> None:
    asked_of(tmp_path, FIRST)
    runner = Tasks(FIRST["tasks"], FIRST["lengths"], 3, None)
    asked = description(runner, FIRST)
    other = attrs.evolve(asked.methods["snapkv 0.1"], parameters="SnapKV(window_size=4)")
    changed = attrs.evolve(asked, methods=asked.methods | {"snapkv 0.1": other})
    with (
        pytest.raises(ValueError, match=r"method snapkv 0\.1 was SnapKV.*got SnapKV\(window_size"),
        opened(tmp_path, changed),
    ):
        pass


def test_data_of_another_origin_is_refused_where_tasks_are_common(tmp_path: Path) -> None:
    asked_of(tmp_path, FIRST, made_of={"needle": {"256": {"prompts": "made"}}})
    asked_of(tmp_path, FIRST, made_of={"reading": {"documents": "a.jsonl"}})
    more = {"needle": {"512": {"prompts": "read"}}}
    asked_of(tmp_path, FIRST, made_of=more)
    assert load(tmp_path).description.settings["made_of"] == {
        "needle": {"256": {"prompts": "made"}, "512": {"prompts": "read"}},
        "reading": {"documents": "a.jsonl"},
    }
    with pytest.raises(ValueError, match="what needle 256 is made of was .*made.*, got .*read"):
        asked_of(tmp_path, FIRST, made_of={"needle": {"256": {"prompts": "read"}}})


def test_refused_prompts_leave_the_settings_as_they_are(tmp_path: Path) -> None:
    asked_of(tmp_path, FIRST)
    before = (tmp_path / SETTINGS).read_bytes()
    runner = Tasks(("needle",), (256, 512), 7, None)
    runner.word = "other"
    more = FIRST | MORE["lengths"] | MORE["limit"]
    with (
        pytest.raises(ValueError, match="document 0 of needle was another"),
        opened(tmp_path, description(runner, more)) as folder,
    ):
        fill(folder, runner, runner.documents())
    assert (tmp_path / SETTINGS).read_bytes() == before
    assert runner.asked == []


def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    asked_of(tmp_path, FIRST)
    file = tmp_path / SETTINGS
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="format must be 1, which this version reads, got 2"):
        load(tmp_path)
    with pytest.raises(ValueError, match="format must be 1"):
        asked_of(tmp_path, FIRST | MORE["limit"])


def test_what_is_read_beyond_the_positions_is_remembered(tmp_path: Path) -> None:
    for beyond in (False, True, False):
        asked_of(tmp_path, FIRST, beyond_positions=beyond)
    assert load(tmp_path).description.settings["beyond_positions"] is True
