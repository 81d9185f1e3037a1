"""Every example in a docstring runs, and everything public has a docstring."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

PACKAGES = [
    "kvpolicy",
    "kvpolicy.policies",
    "kvpolicy.integrations",
    "kvpolicy.integrations.transformers",
    "kvpolicy.evaluation",
    "kvpolicy.evaluation.tasks.needle",
]


def modules() -> list[str]:
    found = list(PACKAGES)
    for package in PACKAGES:
        path = importlib.import_module(package).__path__
        found += [
            f"{package}.{info.name}"
            for info in pkgutil.iter_modules(path)
            if not info.ispkg and info.name != "__main__"
        ]
    return found


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
