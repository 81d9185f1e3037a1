"""Who imports whom, read off the sources: imports for types and inside of functions count too."""

import ast
from collections.abc import Callable, Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Every folder may import itself and those before it.
FOLDERS = {
    "kvpolicy": "kvpolicy",
    "policies": "kvpolicy.policies",
    "integrations": "kvpolicy.integrations",
    "evaluation": "kvpolicy.evaluation",
}
COMMANDS = "kvpolicy.evaluation.commands"
# The command's own entry points.
CALLERS = ("kvpolicy.evaluation.cli", "kvpolicy.evaluation.__main__")


def modules() -> dict[str, Path]:
    """All modules of the library, by name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


def imported(source: str, package: str, known: Collection[str]) -> Iterator[str]:
    """The modules of the library that a source in a package imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: -(node.level - 1) or None] if node.level else []
            origin = ".".join(filter(None, (*parts, node.module)))
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                if name in known or origin in known:
                    yield name if name in known else origin


def all_edges() -> dict[str, set[str]]:
    """The modules that each module imports."""
    known = modules()
    found = {}
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found[name] = set(imported(path.read_text(), package, known))
    return found


@pytest.fixture(scope="module")
def edges() -> dict[str, set[str]]:
    found = all_edges()
    assert len(found) > 250
    assert sum(map(len, found.values())) > 1000
    return found


def folder_of(module: str) -> int:
    """How late the folder of a module comes."""
    packages = list(FOLDERS.values())
    return max(
        index
        for index, package in enumerate(packages)
        if module == package or module.startswith(f"{package}.")
    )


def is_command(module: str) -> bool:
    return module == COMMANDS or module.startswith(f"{COMMANDS}.")


def where(edges: dict[str, set[str]], wrong: Callable[[str, str], bool]) -> list[str]:
    """The imports that are wrong."""
    return [
        f"{module} imports {other}"
        for module, others in edges.items()
        for other in others
        if wrong(module, other)
    ]


def test_reads_every_kind_of_import() -> None:
    known = {"a", "a.b", "a.c", "a.d", "a.e", "a.f", "a.f.g"}
    source = """
import a.b
import os, sys
from a import c, something
from a.d import Something
if TYPE_CHECKING:
    from a import e
def f():
    from ..f import g
    from . import something
"""
    assert list(imported(source, "a.f", known)) == ["a.b", "a.c", "a", "a.d", "a.e", "a.f.g", "a.f"]


def test_folders_import_only_those_before_them(edges: dict[str, set[str]]) -> None:
    assert where(edges, lambda module, other: folder_of(other) > folder_of(module)) == []


def test_only_the_command_imports_commands(edges: dict[str, set[str]]) -> None:
    def from_outside(module: str, other: str) -> bool:
        return is_command(other) and not is_command(module) and module not in CALLERS

    assert where(edges, from_outside) == []


def test_no_modules_import_each_other(edges: dict[str, set[str]]) -> None:
    try:
        list(TopologicalSorter(edges).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")
