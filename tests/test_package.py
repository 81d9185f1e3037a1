"""What is published agrees with itself; `make package` builds it and tries it."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tools.package.contents import ROOT, wheel_names

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def sources() -> set[str]:
    """The files of the folders that make up the package."""
    folders = ("kvpolicy", "policies", "integrations", "evaluation")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file())
    return {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts}


def test_the_wheel_gets_every_file() -> None:
    """Packages and their data are lists; a folder that is forgotten would be missing."""
    settings = PROJECT["tool"]["setuptools"]
    assert not settings["include-package-data"]
    expected = wheel_names(sources())
    assert len(expected) > 250
    taken = set()
    for package in settings["packages"]:
        patterns = ["*.py", *settings["package-data"].get(package, ())]
        folder = re.escape(package.replace(".", "/"))
        for pattern in patterns:
            name = re.escape(pattern).replace(r"\*", "[^/]*")
            taken |= {file for file in expected if re.fullmatch(f"{folder}/{name}", file)}
    assert expected - taken == set()


def test_names_of_the_wheel() -> None:
    files = {"kvpolicy/py.typed", "policies/scorers/lag.py", "README.md", "tests/test_package.py"}
    assert wheel_names(files) == {"kvpolicy/py.typed", "kvpolicy/policies/scorers/lag.py"}


def test_versions_licences_and_addresses_agree() -> None:
    project, citation = PROJECT["project"], load(ROOT / "CITATION.cff")
    assert str(citation["version"]) == project["version"]
    assert citation["license"] == project["license"] == "Apache-2.0"
    assert citation["repository-code"] == project["urls"]["Repository"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:300]
    address = citation["repository-code"]
    for url in re.findall(r"https://github\.com/[\w/.-]+", README + str(project["urls"])):
        assert url.startswith(address)


def test_the_requirements_that_the_readme_names() -> None:
    needs = PROJECT["project"]
    lowest = {
        "Python": needs["requires-python"].removeprefix(">="),
        **dict(re.findall(r"(\w+)>=([\d.]+)", " ".join(needs["dependencies"]))),
    }
    said = re.search(
        r"You need Python ([\d.]+) or later, PyTorch ([\d.]+) or later, and "
        r"Transformers ([\d.]+) or later",
        README,
    )
    assert said is not None
    assert list(said.groups()) == [lowest["Python"], lowest["torch"], lowest["transformers"]]


@pytest.mark.skipif(not FORMS, reason="an sdist has no forms")
def test_the_forms_ask_for_what_is_needed() -> None:
    forms = {file.stem: load(file) for file in FORMS}
    assert forms["config"]["blank_issues_enabled"]
    bug = {part["id"]: part["attributes"] for part in forms["bug_report"]["body"]}
    assert "kvpolicy check MODEL" in bug["check"]["label"]
    assert "kvpolicy --version" in bug["versions"]["description"]
    for name in ("bug_report", "wish"):
        form = forms[name]
        assert {"name", "description", "body"} <= form.keys()
        assert all(part["type"] == "textarea" for part in form["body"])


def test_the_changelog_begins_with_what_is_new() -> None:
    """In sections by version, from the newest, which is the package's; each with its date."""
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[(.*?)\] - (unreleased|\d{4}-\d\d-\d\d)$", text, re.MULTILINE)
    assert len(sections) == len(re.findall(r"^## ", text, re.MULTILINE))
    assert sections[0][0] == PROJECT["project"]["version"]
    assert all(date != "unreleased" for _, date in sections[1:])
    versions = [tuple(map(int, version.split("."))) for version, _ in sections]
    assert versions == sorted(versions, reverse=True)
