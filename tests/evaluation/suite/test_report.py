"""The page: its numbers as a browser shows them, what is unfinished, and that it needs nothing."""

import html
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvpolicy.evaluation.suite import Summary, load, write_report
from kvpolicy.evaluation.suite.report.axes import Axis
from kvpolicy.evaluation.suite.report.charts import Method, NeedleMap, Point, Scatter
from kvpolicy.evaluation.suite.report.page import templates
from kvpolicy.evaluation.suite.summary import Cost
from tests.evaluation.suite.stand_in import StandIn, filled

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


class Scores(HTMLParser):
    """Collects the page's scores by cell, and the texts that are marked as unfinished."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scores: dict[tuple[str, ...], float] = {}
        self.open: list[str] = []
        self._cell: tuple[str, ...] | None = None
        self._is_open = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "data-method" in given:
            names = ("task", "length", "question", "method")
            self._cell = tuple(given.get(f"data-{name}", "") for name in names)
        self._is_open = "open" in given.get("class", "").split()

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self.scores[self._cell] = float(data)
            self._cell = None
        elif self._is_open:
            self.open.append(data)
            self._is_open = False


def cells_of(table: Path) -> list[str]:
    """The Markdown table of the cells, with its header; before it is where they come from."""
    lines = table.read_text().splitlines()
    return lines[next(at for at, line in enumerate(lines) if line.startswith("| task |")) :]


def shown(page: Path) -> str:
    """The page as a browser has built it, or as it is written where there is none."""
    if BROWSER is None:
        return page.read_text()
    return browsed(page.as_uri(), page.parent)


def browsed(address: str, profile: Path) -> str:
    assert BROWSER is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}/.b"]
    found = subprocess.run(
        [BROWSER, *flags, "--virtual-time-budget=5000", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return found.stdout


def test_shows_the_scores_of_every_cell(tmp_path: Path) -> None:
    results = filled(tmp_path)
    page, _ = write_report(results, tmp_path / "report.html")
    scores = Scores(shown(page)).scores
    figures = Summary.of(results).figures
    assert len(scores) == len(figures) == 30
    assert scores["needle", "256", "with", "snapkv 0.1"] == 66.7
    for cell, figure in figures.items():
        length = "" if cell.length is None else str(cell.length)
        assert figure.score is not None
        key = (cell.task, length, cell.question, cell.method)
        assert scores[key] == pytest.approx(figure.score, abs=0.05)


@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
@pytest.mark.parametrize("width", [390, 1280])
def test_is_as_wide_as_the_window(tmp_path: Path, width: int) -> None:
    """Wide tables scroll by themselves; the page does not."""
    page, _ = write_report(filled(tmp_path), tmp_path / "report.html")
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe id="f" width="{width}" height="900" srcdoc="{html.escape(page.read_text())}">'
        "</iframe><script>onload = () => { const seen = document.getElementById('f')"
        ".contentDocument.documentElement; document.title = `${seen.scrollWidth} of "
        "${seen.clientWidth}, ${seen.querySelectorAll('svg').length} drawings` }</script>"
    )
    title = re.search("<title>(.*?)</title>", browsed(frame.as_uri(), tmp_path).split("<iframe")[0])
    assert title is not None
    scroll, client, drawings = map(int, re.findall(r"\d+", title[1]))
    assert client in range(width - 20, width + 1)
    assert scroll <= client
    assert drawings > 30


def test_needs_no_other_file(tmp_path: Path) -> None:
    page, _ = write_report(filled(tmp_path), tmp_path / "report.html")
    text = page.read_text()
    assert "viewport" in text
    for wanted in ("src=", "href=", "url(", "@import", "<script", "http:", "https:"):
        assert wanted not in text


def test_what_is_unfinished_is_marked_and_not_counted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        filled(tmp_path, StandIn(stop_after=10))
    page, table = write_report(load(tmp_path), tmp_path / "report.html")
    parsed = Scores(page.read_text())
    assert list(parsed.scores) == [("needle", "256", "with", "full_context")]
    assert any(text.startswith("Not finished: 29 of 30 cells") for text in parsed.open)
    assert "4 of 6" in parsed.open
    assert "4 of 6 samples: no numbers yet" in parsed.open
    assert "unfinished: snapkv 0.1, snapkv 0.5, fastkv 0.1, fastkv 0.5" in parsed.open
    rows = cells_of(table)
    assert rows[2].startswith("| needle | 256 | with | full_context | 100.0 |")
    assert rows[3] == "| needle | 256 | with | snapkv 0.1 | unfinished |  |  |  |  |  | 4 of 6 |"


def test_a_folder_with_nothing_yet(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        filled(tmp_path, StandIn(stop_after=0))
    page, _ = write_report(load(tmp_path), tmp_path / "report.html")
    text = page.read_text()
    assert Scores(text).scores == {}
    assert "Not finished: 30 of 30 cells" in text
    # No chart without anything to draw, and no heading without a chart.
    assert "<figure>" not in text
    assert not re.findall("<h2>(?:Score against|Time of)", text)


def test_markdown_by_hand(tmp_path: Path) -> None:
    _, table = write_report(filled(tmp_path), tmp_path / "report.html")
    rows = cells_of(table)
    assert len(rows) == 2 + 30
    assert rows[3] == (
        "| needle | 256 | with | snapkv 0.1 | 66.7 | \N{MINUS SIGN}33.3 [\N{MINUS SIGN}70.8, +20.8]"
        " | 26 | 13.1 kB | 256 ms | 512 ms | 6 |"
    )
    assert len({row.count("|") for row in rows}) == 1


def test_names_are_escaped(tmp_path: Path) -> None:
    page, _ = write_report(filled(tmp_path, model="<b>&"), tmp_path / "report.html")
    assert "<b>" not in page.read_text()
    assert "&lt;b&gt;&amp;: policies side by side" in page.read_text()


def test_out_must_be_a_page(tmp_path: Path) -> None:
    results = filled(tmp_path)
    with pytest.raises(ValueError, match=r"ends in \.html, got"):
        write_report(results, tmp_path / "report.txt")
    (tmp_path / "report.md").mkdir()
    with pytest.raises(ValueError, match="a folder"):
        write_report(results, tmp_path / "report.html")


def test_axes_by_hand() -> None:
    assert Axis.from_zero("", 257).ticks == (0, 100, 200, 300)
    assert Axis.from_zero("", 0.0).ticks[-1] > 0
    factors = Axis.in_factors("", [7.0, 30.0], 100)
    assert factors.ticks == (5, 10, 20, 50, 100)
    assert Axis.in_factors("", [100.0], 100).ticks == (50, 100)
    assert [factors.share(value) for value in (5, 100)] == [0, 1]
    assert factors.share(50**0.5 * 10**0.5) == pytest.approx(0.5)


def drawn(name: str, *given: object) -> str:
    """A drawing of the page."""
    return str(getattr(templates().get_template("drawings.html").module, name)(*given))


def test_points_lie_where_their_numbers_are() -> None:
    axis = Axis.from_zero("ms", 300)
    points = [Point(1, 300, 100, "b"), Point(1, 150, 50, "a")]
    shown = drawn("scatter", Scatter(axis, points), "label")
    line = re.search(
        r'polyline class="line c1" points="([\d.]+),([\d.]+) ([\d.]+),([\d.]+)"', shown
    )
    assert line is not None
    x1, y1, x2, y2 = map(float, line.groups())
    assert x2 - x1 == pytest.approx(x1 - 44, abs=0.2)  # half of the way is half of the width
    assert y1 - y2 == pytest.approx(10 + 190 - y1, abs=0.2)
    marks = re.findall(r'mark c1" transform="translate\(([\d.]+) ([\d.]+)\)"', shown)
    assert [tuple(map(float, each)) for each in marks] == [(x1, y1), (x2, y2)]
    ticks = re.findall(r'<text class="end" x="38" y="([\d.]+)">(\d+)<', shown)
    heights = {int(score): float(y) - 4 for y, score in ticks}
    assert heights[100] == pytest.approx(y2)
    assert heights[20] - heights[40] == pytest.approx((heights[0] - heights[100]) / 5)


def test_marks_of_32_policies_differ() -> None:
    marks = {drawn("mark", number, 5, 5) for number in range(32)}
    assert len(marks) == 32
    assert all(each.strip().startswith("<path") for each in marks)


def test_bars_and_maps_have_their_numbers() -> None:
    times = {"a": (1.0, 4.0), "b": (2.0, 2.0)}
    rows = [Method(name, 0, 50.0, Cost(1, 1, 1, *each)) for name, each in times.items()]
    shown = drawn("times", rows, "x")
    widths = [float(each) for each in re.findall(r"<i style=.width: ([\d.]+)%", shown)]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 3, 2, 0], abs=0.01)
    assert widths[0] + widths[1] == 100
    assert re.findall(r"</i>(\d s)</span>", shown) == ["4 s", "2 s"]
    needles = NeedleMap("a", ["256"], ["0-50", "50-100"], {(0, 1): (25.0, 4)}, finished=True)
    shown = drawn("heat_map", needles, "x")
    assert "25.0 % of 4 samples" in shown
    assert shown.count('class="none"') == 1
    assert 'fill-opacity="0.25"' in shown


def test_drawings_escape_their_texts() -> None:
    row = Method("<b>&", 0, 50.0, Cost(1, 1, 1, 1.0, 2.0))
    scatter = Scatter(Axis.from_zero("<b>&", 1.0), [Point(0, 1.0, 50, "<b>&")])
    for shown in (drawn("times", [row], '"<b>&'), drawn("scatter", scatter, '"<b>&')):
        assert "<b>" not in shown
        assert 'aria-label="&#34;&lt;b&gt;&amp;"' in shown
        assert shown.count("&lt;b&gt;&amp;") >= 2


def test_the_same_results_are_the_same_page(tmp_path: Path) -> None:
    results = filled(tmp_path)
    first, second = (write_report(results, tmp_path / f"{name}.html")[0] for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_says_which_extra_brings_jinja2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"jinja2 is not installed.*kvpolicy\[cli\]"):
        write_report(filled(tmp_path), tmp_path / "report.html")
