"""Gives policies and arguments of an existing results folder the names that they have today.

A folder that an earlier version began holds that version's names of policies (`EARLIER`) and of
arguments (`earlier_arguments`). All readers of folders see today's names, so that a policy is one
row of a report and is not run again; the files stay as they are.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

import attrs

from kvpolicy import policies
from kvpolicy.decoding import DecodingEviction
from kvpolicy.evaluation.suite.sample import Cell, Method, Sample
from kvpolicy.names import EARLIER
from kvpolicy.policy import CachePolicy
from kvpolicy.registry import registered
from kvpolicy.renamed import earlier_arguments

# Classes that the repr of a policy names, beside those of `kvpolicy.policies`.
_CORE: dict[str, type] = {each.__name__: each for each in (CachePolicy, DecodingEviction)}


def present_label(label: str) -> str:
    """Return a method's label, such as ``"ada_kv 0.1"``, with today's name of its policy.

    Example:
        >>> present_label("ada_kv 0.1")
        'adakv 0.1'
    """
    name, space, retention = label.partition(" ")
    return f"{_present_policy(name)}{space}{retention}"


def present_cell(cell: Cell) -> Cell:
    """Return a cell with today's name of its policy."""
    return attrs.evolve(cell, method=present_label(cell.method))


def present_sample(sample: Sample) -> Sample:
    """Return a sample with today's name of its policy."""
    policy = _present_policy(sample.policy)
    return attrs.evolve(sample, cell=present_cell(sample.cell), policy=policy)


def present_method(method: Method) -> Method:
    """Return the saved form of a method with today's names of its policy and arguments."""
    parameters = present_call(method.parameters)
    return attrs.evolve(method, policy=_present_policy(method.policy), parameters=parameters)


def present_call(text: str) -> str:
    """Return the source code of a policy with today's names of its and its parts' arguments.

    Text that is no source code, as another package's policy may print it, is returned unchanged.

    Example:
        >>> present_call("FastV(decoding=None, drop_layer=1, visual_rate=0.5)")
        'FastV(decoding=None, tsp_layer=1, tsp_rate=0.5)'
    """
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return text
    lines = text.encode().splitlines(keepends=True)
    places = sorted(_earlier_keywords(tree), key=lambda it: (it[0].lineno, it[0].col_offset))
    for keyword, new in reversed(places):  # so that the places before it stay
        old = str(keyword.arg).encode()
        line, start = lines[keyword.lineno - 1], keyword.col_offset
        lines[keyword.lineno - 1] = line[:start] + new.encode() + line[start + len(old) :]
    return b"".join(lines).decode()


def _earlier_keywords(tree: ast.AST) -> Iterator[tuple[ast.keyword, str]]:
    """Yield each argument under an earlier name in calls of this package's classes, and its name.

    The name is the one of today.
    """
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            renamed = earlier_arguments(_class_of(call.func.id))
            for keyword in call.keywords:
                if keyword.arg is not None and keyword.arg in renamed:
                    yield keyword, renamed[keyword.arg]


def _class_of(name: str) -> object:
    return getattr(policies, name) if name in policies.__all__ else _CORE.get(name)


@functools.cache  # looked up for every sample
def _present_policy(name: str) -> str:
    if name not in EARLIER:
        return name
    known = registered("policy")  # another package may use the earlier name
    return EARLIER[name] if name not in known and EARLIER[name] in known else name
