"""The README's examples run, its figures and links are true; tables of results are as measured."""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import BASELINE, read_json
from kvpolicy.evaluation.comparison.times import Ratio
from kvpolicy.integrations.transformers.model.tested import TESTED
from kvpolicy.registry import registered
from tests.integrations.model.builds.catalogue import builds
from tests.pages import PYTHON, ROOT, printed, text_of
from tests.support_hub import tiny_qwen
from tests.support_table import PAGE, outcomes, page

BUILDS = builds()
README = text_of("README.md")
HUB, SCORER = PYTHON.findall(README)


# Where the repository's pages and other files are read.
ADDRESS = "kvpolicy/kvpolicy"
PAGES = f"https://github.com/{ADDRESS}/blob/main/"
FILES = f"https://raw.githubusercontent.com/{ADDRESS}/main/"


def test_the_example_of_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model and a tokenizer of the named one's classes, with random weights."""
    monkeypatch.chdir(tmp_path)
    Path("report.txt").write_text("The rain wrote this, and it costs a little. " * 8)
    folder = tiny_qwen(tmp_path / "model")
    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == "Qwen2ForCausalLM"
    assert type(AutoTokenizer.from_pretrained(folder)).__name__.startswith("Qwen2Tokenizer")
    assert HUB.count('"Qwen/Qwen2.5-1.5B-Instruct"') == 1
    code = HUB.replace('"Qwen/Qwen2.5-1.5B-Instruct"', repr(str(folder))).replace("256", "4")
    total = printed(code).splitlines()[-1].split()
    assert total[0] == "total"
    # A little more than a fifth: the answer's tokens are kept too.
    assert 20 < float(total[-1].rstrip("%")) < 24
    assert len(HUB.strip().splitlines()) <= 20


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
def test_the_example_of_a_scorer() -> None:
    printed(SCORER)
    assert len(SCORER.strip().splitlines()) <= 17


def test_the_tables_of_families_are_what_was_found() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_what_needs_no_self_check_was_found_right() -> None:
    """Every build of such a type; PaliGemma is held by the tests with images."""
    found: dict[str, set[str]] = {}
    for each in outcomes():
        model_type = BUILDS[each["name"]].model_type
        found.setdefault(model_type, set()).add(each["outcome"])
    right = {name for name, outcome in found.items() if outcome == {"right"}}
    assert TESTED - {"paligemma"} <= right


def cells_of(page: str, columns: int) -> dict[str, list[str]]:
    """The rows of the tables of so many columns that begin with a method, by the method."""
    classes = {factory.__name__ for factory in registered("policy").values()}
    rows = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        name = cells[0].partition(",")[0].strip("`") if cells else ""
        if len(cells) == columns and name in classes:
            rows[name] = cells[1:]
    return rows


def speed_of(rows: list[dict[str, Any]], name: str, context: int, phase: str) -> str:
    """As the tables have it: a median, marked where its rounds disagree or are few."""
    at = {row["policy"]: row for row in rows if row["context"] == context}
    times = zip(at[name][f"{phase}_ms"], at[BASELINE][f"{phase}_ms"], strict=True)
    return Ratio(tuple(theirs / ours for ours, theirs in times)).text


def test_the_tables_of_results_are_those_of_the_files() -> None:
    results = ROOT / "benchmarks/results"
    speeds = json.loads((results / "methods.json").read_text())["rows"]
    page = (ROOT / "docs/results.md").read_text()
    long = cells_of(page, 8)
    for name in dict.fromkeys(row["policy"] for row in speeds if row["policy"] != BASELINE):
        factory = registered("policy")[name]
        cells = long[factory.__name__]
        found = [
            speed_of(speeds, name, context, phase)
            for phase in ("prefill", "decode")
            for context in (2048, 8192, 32768)
        ]
        assert [cell.partition(" ")[0] for cell in cells[:6]] == found
    shares: dict[str, list[str]] = {}
    for each in json.loads((results / "methods.json").read_text())["overhead"]:
        method = registered("policy")[each["policy"]].__name__
        shares.setdefault(method, []).append(f"{100 * each['share']['median']:.1f}%")
    scoring = cells_of(page[page.index("**Scoring, choosing and storing**") :], 4)
    assert len(scoring) > 7
    assert {method: shares[method] for method in scoring} == scoring


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(file: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def test_what_pages_link_exists() -> None:
    for file in (ROOT / "docs").rglob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", file.read_text()):
            assert (file.parent / link).exists(), f"{file.name} links {link}"


def test_what_the_readme_links_exists() -> None:
    """All links are absolute, as a package index needs them, and those into this repository."""
    links = re.findall(r"\]\(([^)]+)\)", README)
    own = [link for link in links if "kvpolicy/kvpolicy" in link]
    assert len(own) > 8
    missing = []
    for link in own:
        path, _, anchor = link.partition("#")
        found = re.fullmatch(rf"({PAGES}|{FILES})(.*)", path)
        assert found is not None, link
        file = ROOT / found[2]
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            missing.append(link)
    assert missing == []
    assert all(link.startswith("https://") for link in links)


def test_anchors_are_githubs() -> None:
    assert slug("How `generate` decodes") == "how-generate-decodes"
    assert slug("What it can, and cannot: 128K") == "what-it-can-and-cannot-128k"
    assert "on-a-gpu" in anchors(ROOT / "docs/results.md")


def test_the_readme_is_short() -> None:
    assert len(README) <= 6500
    cells = [
        cell.strip() for line in README.splitlines() if line[:1] == "|" for cell in line.split("|")
    ]
    assert len(cells) > 10
    assert max(map(len, cells)) <= 80


def test_the_figures_of_the_readme_are_the_measured_ones() -> None:
    """Who measures again writes the README's first lines anew."""
    record, context = read_json(ROOT / "benchmarks/results/gpu.json"), 131072
    at = {cell["policy"]: cell for cell in record["cells"] if cell["context"] == context}
    full, policy = at["full_context"], at["fastkv"]
    gpu = record["machine"]["gpu"]
    slow, fast = (median(cell["prefill_ms"]) / 1000 for cell in (full, policy))
    held, kept = (cell["held_bytes"] for cell in (full, policy))
    text = " ".join(README[: README.index("\n## ")].split())
    read = f"reads {context:,} tokens in {slow:.1f} s and then holds {held / 1e9:.1f} GB"
    assert f"on one {gpu}," in text
    assert read in text
    assert f"it takes {fast:.1f} s and holds {kept / 1e9:.1f} GB" in text


def test_the_numbers_of_the_readmes_words_are_measured() -> None:
    """Those beside its tables: of the results on real models, and of the GPU's."""
    cells = read_json(ROOT / "benchmarks/results/real.json")["cells"]

    def right(policy: str, cell: str = "smollm2 needles 1000 known") -> float:
        rows = cells[cell]["rows"]
        (score,) = (it["score"] for it in rows if (it["policy"], it["kind"]) == (policy, "all"))
        return float(100 * score)

    def lost(policy: str, cell: str) -> float:
        full = right("full context", cell)
        return (full - right(policy, cell)) / full

    def percents(*policies: str) -> list[str]:
        return [f"{right(f'{each} 0.2'):.0f}%" for each in policies]

    later = f"{right('replaykv 0.2', 'smollm2 needles 1000 later'):.0f}%"
    snap_later = f"{right('snapkv 0.2', 'smollm2 needles 1000 later'):.0f}%"
    replay, snap, drop, fast, gem, chunk = percents(
        *("replaykv", "snapkv", "replaykv_dropping", "fastkv", "gemfilter", "chunkkv")
    )
    times = cells["smollm2 needles 4000 known"]["times"]
    gpu = read_json(ROOT / "benchmarks/results/gpu.json")["cells"]
    speed = {it["policy"]: it["prefill_speedup"] for it in gpu if it["context"] == 131072}
    for said in (
        f"| {replay}, later {later}; `SnapKV` {snap}, {snap_later} |",
        f"| {drop} in {times['replaykv_dropping']['prefill_cpu']:.2f} of the time |",
        f"| {speed['fastkv']:.1f}, {speed['gemfilter']:.1f} times as fast at 131,072 tokens; "
        f"{fast}, {gem} |",
        f"| {chunk}, {snap}; prefill as full context |",
    ):
        assert said in README
    for policy in ("snapkv", "chunkkv"):
        assert times[policy]["prefill_cpu"] == pytest.approx(1, abs=0.05)
    # "loses two thirds of the answers on Gemma 3 270M; ... a tenth, with a drop a third"
    assert lost("replaykv 0.2", "gemma needles 1000 known") == pytest.approx(2 / 3, abs=0.1)
    assert lost("replaykv 0.2", "smollm2 needles 2000 known") == pytest.approx(1 / 10, abs=0.05)
    assert lost("replaykv_dropping 0.2", "smollm2 needles 2000 known") == pytest.approx(
        1 / 3, abs=0.05
    )


def test_the_tables_of_methods() -> None:
    """The page names every method once, with its page; the README some of them, and how many."""
    classes = sorted(factory.__name__ for factory in registered("policy").values())
    page = (ROOT / "docs/methods/README.md").read_text()
    found = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\) \|", page, re.MULTILINE)
    assert sorted(name for name, _ in found) == classes
    names = {factory.__name__: name for name, factory in registered("policy").items()}
    assert all(names[method] == page for method, page in found)
    assert f"[All {len(classes)} methods]" in README
    section = README[README.index("\n## Methods") : README.index("\n## Compose")]
    table = [line for line in section.splitlines() if line.startswith("| ") and "`" in line]
    named = {name for line in table for name in re.findall(r"`([A-Z]\w+)", line)}
    assert len(table) == 5
    assert named < set(classes)
