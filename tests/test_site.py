"""What the documentation site is made of; `make docs` builds it and follows its links."""

import importlib
import json
import re
from pathlib import Path

import pytest
import typer

from docs._site import check_links, entries, tutorials
from docs._site.repository import ROOT, repository
from kvpolicy.evaluation.commands.app import app
from tests.test_api_page import MODULES

REFERENCE = {path.stem: path.read_text("utf-8") for path in ROOT.glob("docs/reference/*.md")}
GROUP = typer.main.get_command(app)


def test_every_public_name_is_on_one_reference_page() -> None:
    found: list[tuple[str, str]] = []
    for page in REFERENCE.values():
        for module, kind in entries.NAMES.findall(page):
            found += [(module, name) for name in entries.names_in(module, kind or None)]
    public = [
        (module, name) for module in MODULES for name in importlib.import_module(module).__all__
    ]
    assert sorted(found) == sorted(public)


def test_names_become_directives_of_their_kind() -> None:
    shown = entries.filled("# E\n\n<!-- public names: kvpolicy.errors -->\n")
    assert ".. autoexception:: kvpolicy.errors.ShapeError\n   :members:" in shown
    shown = entries.filled("<!-- public names: kvpolicy -->")
    assert ".. autofunction:: kvpolicy.build\n" in shown
    assert ".. autoclass:: kvpolicy.Scorer\n   :members:" in shown


def test_every_option_of_every_command_is_shown() -> None:
    shown = entries.filled(REFERENCE["command_line"])
    for name, command in GROUP.commands.items():  # type: ignore[attr-defined]
        text = shown.partition(f"\n.. program:: kvpolicy {name}\n")[2].partition("\n```")[0]
        listed = re.findall(r"^\.\. option:: (.*)", text, re.MULTILINE)
        names = {part.split()[0] for line in listed for part in line.split(", ")}
        params = [each for each in command.params if each.param_type_name == "option"]
        assert names == {each for it in params for each in (*it.opts, *it.secondary_opts)}
        assert len(listed) == len(params)
    count = GROUP.commands["compare"].params  # type: ignore[attr-defined]
    told = next(each for each in count if each.name == "count").help
    assert f".. option:: --count N\n\n   {told}" in shown
    assert ".. option:: --policy NAMES, --policies NAMES, -p NAMES" in shown


def test_broken_links_are_found(tmp_path: Path) -> None:
    file = f"{repository()}/blob/main"
    links = [
        "two.html#there",
        "two.html#missing",
        "gone.html",
        "#here",
        "#nowhere",
        "https://example.org/any",
        f"{file}/README.md",
        f"{file}/docs/own_parts.md#write-your-own-scorer",
        f"{file}/docs/own_parts.md#no-such-heading",
        f"{file}/docs/no_such_page.md",
        f"{repository()}/tree/main/docs/examples",
    ]
    body = "".join(f'<a href="{link}">x</a>' for link in links)
    (tmp_path / "one.html").write_text(f'<p id="here">{body}</p><img src="gone.png">')
    (tmp_path / "two.html").write_text('<h2 id="there">x</h2>')
    broken = [line.split(": ")[1] for line in check_links.faults(tmp_path)]
    wrong = [links[1], links[2], links[4], links[8], links[9], "gone.png"]
    assert sorted(broken) == sorted(wrong)
    assert check_links.main(str(tmp_path)) == 1


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
@pytest.mark.parametrize("path", tutorials.notebooks(), ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_stored(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert tutorials.run(notebook) == tutorials.stored(notebook)
    assert len([text for text in tutorials.stored(notebook) if text]) >= 5


def test_notebooks_are_two() -> None:
    assert [path.stem for path in tutorials.notebooks()] == ["hub_model", "own_scorer"]
