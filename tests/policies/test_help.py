"""What `help` says of every registered method and part: all of its arguments, and the truth."""

import inspect
import re
from typing import Any

import attrs
import pytest

import kvpolicy
from kvpolicy.policies import FastKV, PyramidKV, SinkAndRecentSelector, SnapKV
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod

REGISTERED: dict[str, Any] = kvpolicy.registered()
METHODS: dict[str, Any] = kvpolicy.registered("policy")

ROLLING = kvpolicy.DecodingEviction(None, SinkAndRecentSelector(retention_tokens=64))


def documented_arguments(factory: Any) -> dict[str, str]:
    doc = inspect.getdoc(factory) or ""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    entries = re.findall(
        r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", section[1] if section else "", re.M | re.S
    )
    return {name: " ".join(text.split()) for name, text in entries}


@pytest.mark.parametrize("name", REGISTERED)
def test_every_argument_is_documented_in_the_order_of_the_signature(name: str) -> None:
    factory = REGISTERED[name]
    assert list(documented_arguments(factory)) == list(inspect.signature(factory).parameters)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_all_sections_once_and_in_order(name: str) -> None:
    factory = METHODS[name]
    takes_something = bool(inspect.signature(factory).parameters)
    doc = inspect.getdoc(factory) or ""
    expected = [*(["Args", "Raises"] if takes_something else []), "Example"]
    if factory.paper:
        expected.append("Source")
        assert factory.paper in doc.partition("\nSource: ")[2].replace("\n", " ")
    assert re.findall(r"^([A-Z]\w+):", doc, re.MULTILINE) == expected
    assert not re.search(r"TODO|FIXME|XXX|[{}]|<\w+>|\.\.\.$", doc, re.MULTILINE)
    assert max(len(line) for line in doc.splitlines()) <= 96


def outside_and_inside(text: str) -> tuple[list[Any], list[Any], str]:
    """Values that an argument's description rules out, some that it allows, and what is said."""
    if least := re.search(r"at least (\d+)", text, re.IGNORECASE):
        return [int(least[1]) - 1], [int(least[1])], f"must be at least {least[1]}"
    for pattern, found in {
        r"^Indices": ([(-1,)], [(0,)], "must be at least 0"),
        r"^Whether": ([], [False, True], ""),
        r"in \(0, 1\]": ([0.0, 1.01], [0.5 if "average" in text else 1.0], r"must be in \(0, 1\]"),
        r"in \[0, 1\]": ([-0.01, 1.01], [0.0, 1.0], r"must be in \[0, 1\]"),
        r"\bodd\b": ([2], [3], "must be odd"),
        r"\babove 0\b": ([0.0], [0.1], "must be above 0 and finite"),
        r"\bfrom 0\b": ([-1], [0], "must be at least 0"),
        r"^A `DecodingEviction`": ([1], [None, ROLLING], "must be a DecodingEviction or None"),
        r"^Ids\b": ([[-1]], [[], [0, 3]], "must be at least 0"),
    }.items():
        if re.search(pattern, text):
            return found
    raise AssertionError(f"no range in: {text}")


@pytest.mark.parametrize(
    ("name", "argument", "text"),
    [
        (name, argument, text)
        for name, factory in METHODS.items()
        for argument, text in documented_arguments(factory).items()
    ],
)
def test_the_range_that_is_documented_is_the_one_that_is_checked(
    name: str, argument: str, text: str
) -> None:
    outside, inside, said = outside_and_inside(text)
    for value in outside:
        with pytest.raises(ValueError, match=rf"{argument} (of \w+ )?{said}"):
            METHODS[name](**{argument: value})
    for value in inside:
        if "at most ``tsp_rate``" not in text:
            METHODS[name](**{argument: value})


def test_own_wordings_take_the_place_of_the_shared_ones() -> None:
    assert "on average" in documented_arguments(PyramidKV)["retention_rate"]
    assert "observation window, at least 1" in documented_arguments(SnapKV)["window_size"]
    assert "exceeds the TSP budget" in (inspect.getdoc(FastKV) or "")


def test_an_argument_that_nobody_documents_is_refused() -> None:
    @attrs.frozen
    class Undescribed(EvictionMethod):
        """Keeps something."""

        width: int = 3

    with pytest.raises(TypeError, match="Undescribed must describe width under Args"):
        documented(Undescribed)


def test_what_is_no_argument_is_refused() -> None:
    class Forgotten(EvictionMethod):
        """Keeps something, and lacks `attrs.frozen`.

        Args:
            width: Of something, odd.
        """

        width: int = 3

    with pytest.raises(TypeError, match="Forgotten must describe nothing else .* got width"):
        documented(Forgotten)


def test_without_docstrings_there_is_nothing_to_complete() -> None:
    class Bare:
        pass

    assert documented(Bare) is Bare
    assert Bare.__doc__ is None
