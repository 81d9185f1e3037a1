"""Help and wrong command lines come without torch and Transformers, whose imports take seconds."""

import ast
import importlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpolicy.errors import UnknownPolicyError
from kvpolicy.registry import check_names
from tests.processes import python

HEAVY = ("torch", "transformers")
SCRIPT = f"""
import json, sys
from kvpolicy.evaluation.cli import main
lines = json.loads(sys.argv[1])
statuses = [main(line) for line in lines]
print(json.dumps([statuses, [name for name in {HEAVY} if name in sys.modules]]))
"""


def run_lines(lines: Sequence[Sequence[str]]) -> tuple[list[int], list[str], str]:
    """Of a process of its own: exit statuses, heavy modules that it imported, and messages."""
    done = python("-c", SCRIPT, json.dumps(lines))
    statuses, heavy = json.loads(done.stdout.splitlines()[-1])
    return statuses, heavy, done.stderr


def test_help_and_wrong_command_lines_import_nothing_heavy() -> None:
    """What the classes of options refuse is reported with status 1."""
    commands = ("analyze", "calibrate", "check", "compare", "estimate", "eval")
    names = (*commands, "export", "generate", "policies", "serve-check")
    right = [["--help"], ["--version"], [], *([name, "--help"] for name in names)]
    wrong = [
        ["complare"],
        ["--nonsense"],
        *([name, "--nonsense"] for name in names),
        ["estimate"],
        ["compare", "--rate", "much"],
        ["estimate", "--config", "x", "--context", "0"],
    ]
    refused = [
        ["compare", "--rate", "0.1", "--retention-tokens", "5"],
        ["compare", "--set", "window_size"],
        ["generate", "--prompt-file", "-", "--decoding-every", "4"],
        ["generate"],
    ]
    statuses, heavy, said = run_lines(right + wrong + refused)
    assert statuses == [0] * len(right) + [2] * len(wrong) + [1] * len(refused)
    assert heavy == []
    assert said.count("error: ") == len(wrong) + len(refused)


def test_unknown_names_import_nothing_heavy() -> None:
    """The message is the one that the registry gives, with the nearest and all known names."""
    estimate = ["estimate", "--config", "Llama-3.1-8B", "--context", "8"]
    lines: dict[tuple[str, ...], dict[str, list[str]]] = {
        ("generate", "--prompt", "x", "--policy", "snapvk"): {"policy": ["snapvk"]},
        ("eval", "--tasks", "x", "--out", "x", "-p", "fastvk"): {"policy": ["fastvk"]},
        ("compare", "-p", "snapkv,nothing,h20"): {"policy": ["nothing", "h20"]},
        ("export", "--prompt-file", "-", "--to", "x", "-p", "rkw"): {"policy": ["rkw"]},
        (*estimate, "-p", "x"): {"policy": ["x"]},
        ("generate", "--prompt", "x", "--scorer", "key_nrm:a=1", "--selector", "gqa"): {
            "scorer": ["key_nrm"],
            "selector": ["gqa"],
        },
        ("compare", "--propagation", "piramid"): {"propagation": ["piramid"]},
    }
    statuses, heavy, told = run_lines([*lines])
    assert (statuses, heavy) == ([1] * len(lines), [])
    said = []
    for asked in lines.values():
        with pytest.raises(UnknownPolicyError) as caught:
            check_names(asked)
        said.append(f"error: {caught.value}")
    assert told.splitlines() == said


@pytest.mark.parametrize("package", ["kvpolicy", "kvpolicy.evaluation"])
def test_lazy_packages_have_all_their_names(package: str) -> None:
    """What type checkers read and what is imported on use are the same names."""
    module = importlib.import_module(package)
    assert module.__file__ is not None
    found = {}
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module != "typing":
            found |= {alias.name: node.module for alias in node.names}
    assert found.pop("lazy_names") == "kvpolicy.lazy"
    assert sorted(found) == sorted(module.__all__)
    for name, origin in found.items():
        assert origin is not None
        assert getattr(module, name) is getattr(importlib.import_module(origin), name)
        assert name in dir(module)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        module.nonsense  # noqa: B018


def test_modules_are_attributes_of_lazy_packages() -> None:
    code = "import kvpolicy; print(kvpolicy.registry.__name__, kvpolicy.build.__module__)"
    assert python("-c", code).stdout.split() == ["kvpolicy.registry", "kvpolicy.registry"]
