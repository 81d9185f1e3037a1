"""Every example in a docstring runs, and everything public has a docstring."""

import doctest
import importlib
import inspect
import pkgutil
import tomllib
from importlib.util import find_spec

import pytest

from tests.pages import ROOT, text_of

CONFIG = tomllib.loads(text_of("pyproject.toml"))
PACKAGES: list[str] = CONFIG["tool"]["setuptools"]["packages"]
# Modules that can be imported only beside a package that the tests are not installed with.
NEEDS = {"kvpolicy.integrations.vllm.connector": "vllm"}


def modules() -> list[str]:
    found = list(PACKAGES)
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        found += [
            f"{package}.{info.name}"
            for info in pkgutil.iter_modules(path)
            if not info.ispkg and info.name != "__main__"
        ]
    return [name for name in found if name not in NEEDS or find_spec(NEEDS[name]) is not None]


def test_every_package_is_installed() -> None:
    folders = {
        str(file.parent.relative_to(ROOT))
        for top in ("kvpolicy", "policies", "integrations", "evaluation")
        for file in (ROOT / top).rglob("__init__.py")
    }
    places = {(package + "/").replace("kvpolicy.", "", 1).strip("/") for package in PACKAGES}
    places = {
        place if place.split(".")[0] != "testing" else f"kvpolicy.{place}" for place in places
    }
    assert folders == {place.replace(".", "/") for place in places}


@pytest.mark.parametrize("name", modules())
def test_examples(name: str) -> None:
    failures, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failures == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    count = sum(
        bool(test.examples)
        for name in modules()
        for test in finder.find(importlib.import_module(name))
    )
    assert count >= 20


@pytest.mark.parametrize("name", modules())
def test_everything_public_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    for attribute, value in vars(module).items():
        if attribute.startswith("_") or getattr(value, "__module__", None) != name:
            continue
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{attribute} has no docstring"
