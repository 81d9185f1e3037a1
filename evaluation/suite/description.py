"""Describe what a results folder contains, and whether two folders may be joined.

A description has three kinds of settings. Some only grow: tasks, lengths, questions, methods and
numbers of samples. The model by its content, the chat template and the like decide what is
answered, and must be the same for all samples that are compared. Machine, threads and versions of
libraries must be the same within a folder; a report on several folders lists how they differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from kvpolicy.evaluation.suite.sample import Cell, Method

FORMAT = 1
# For each setting that can only grow: how to combine the values of two runs.
_LISTS = ("tasks", "lengths", "questions", "include")
_GROWING = (*_LISTS, "limit", "data", "beyond_positions", "made_of")
_PLACE = ("device", "threads", "batch_size")


@attrs.frozen
class Description:
    """The description of a results folder: the evaluation's settings, machine and methods.

    Args:
        settings: What was asked for, and the model, as plain data.
        environment: Versions of libraries, and the machine.
        methods: By label, full context first.
        expected: How many samples every cell has when it is finished, in the order of asking.
    """

    settings: dict[str, Any]
    environment: dict[str, Any]
    methods: dict[str, Method]
    expected: dict[Cell, int]

    def to_json(self) -> str:
        """Return the description as the text of the file ``settings.json``."""
        cells = [{**attrs.asdict(cell), "samples": count} for cell, count in self.expected.items()]
        methods = {label: attrs.asdict(method) for label, method in self.methods.items()}
        data = {"format": FORMAT, "settings": self.settings, **self.environment}
        return json.dumps(data | {"methods": methods, "cells": cells}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Description:
        """Parse a description from the text of ``settings.json``.

        Raises:
            ValueError: The text is not the settings of an evaluation, or has another format.
        """
        try:
            read = json.loads(text)
            number = read.pop("format")
            if number != FORMAT:
                raise ValueError(f"format must be {FORMAT}, which this version reads, got {number}")
            cells = [(each.pop("samples"), Cell(**each)) for each in read.pop("cells")]
            methods = {label: Method(**each) for label, each in read.pop("methods").items()}
            expected = {cell: count for count, cell in cells}
            return cls(read.pop("settings"), read, methods, expected)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not the settings of an evaluation: {error}") from None

    def conflicts(self, other: Description) -> list[str]:
        """List the differences between two evaluations that affect the answers; empty if none.

        A model counts by its content, whatever its name. A policy or a task that only one of them
        has is no conflict.
        """
        own, its = _contents(self), _contents(other)
        if "fingerprint" in own and "fingerprint" in its:
            own, its = ({**each, "model": None} for each in (own, its))
        found = _unlike(own, its)
        for made in (_parameters, _origins):
            own, its = made(self), made(other)
            found += _unlike(own, its, [name for name in own if name in its])
        return found

    def circumstances(self, other: Description) -> list[tuple[str, str, str]]:
        """List how two evaluations differ in machine, threads and versions: name, both values.

        The number of a machine's processors is ignored.
        """
        own, its = _place(self), _place(other)
        names = [name for name in {**own, **its} if own.get(name) != its.get(name)]
        return [(name, _text(own.get(name)), _text(its.get(name))) for name in names]

    def differences(self, other: Description) -> list[str]:
        """List why two evaluations cannot share a folder; empty if they can."""
        unlike = [f"{name} was {was}, got {got}" for name, was, got in self.circumstances(other)]
        return [*self.conflicts(other), *unlike]

    def joined(self, other: Description) -> Description:
        """Return a description of everything that the two evaluations ask.

        The model's name, the machine and the versions are the first one's.
        """
        methods = {**self.methods, **other.methods}
        expected = dict(self.expected)
        for cell, count in other.expected.items():
            expected[cell] = max(count, expected.get(cell, 0))
        tasks = list(dict.fromkeys(cell.task for cell in expected))
        lengths = list(dict.fromkeys((cell.task, cell.length) for cell in expected))
        questions = list(dict.fromkeys(cell.question for cell in expected))
        labels = list(methods)

        def place(cell: Cell) -> tuple[int, int, int, int]:
            return (
                tasks.index(cell.task),
                lengths.index((cell.task, cell.length)),
                questions.index(cell.question),
                labels.index(cell.method),
            )

        return Description(
            _joined_settings(self.settings, other.settings),
            self.environment,
            methods,
            {cell: expected[cell] for cell in sorted(expected, key=place)},
        )


def _contents(description: Description) -> dict[str, Any]:
    """Return the settings that decide the answers."""
    others = (*_GROWING, *_PLACE)
    return {name: value for name, value in description.settings.items() if name not in others}


def _place(description: Description) -> dict[str, Any]:
    """Return where an evaluation ran: device, threads, versions and machine."""
    settings, environment = description.settings, description.environment
    versions, machine = environment.get("versions", {}), environment.get("machine", {})
    return {
        **{name: settings[name] for name in _PLACE if name in settings},
        **{f"version of {name}": value for name, value in versions.items()},
        **{name: value for name, value in machine.items() if name != "cpus"},
    }


def _unlike(
    own: Mapping[str, Any], its: Mapping[str, Any], names: Iterable[str] | None = None
) -> list[str]:
    return [
        f"{name} was {_text(own.get(name))}, got {_text(its.get(name))}"
        for name in ({**own, **its} if names is None else names)
        if own.get(name) != its.get(name)
    ]


def _parameters(description: Description) -> dict[str, Any]:
    """Return the parameters of each method."""
    return {f"method {label}": each.parameters for label, each in description.methods.items()}


def _origins(description: Description) -> dict[str, Any]:
    """Return the origin of each task's documents, by task and, if it has lengths, by length."""
    return {
        f"what {task} {key} is made of": value
        for task, made in description.settings.get("made_of", {}).items()
        for key, value in made.items()
    }


def _joined_settings(own: Mapping[str, Any], its: Mapping[str, Any]) -> dict[str, Any]:
    found = {**its, **own}
    for name in _LISTS:
        if name in found:
            found[name] = list(dict.fromkeys([*own.get(name, ()), *its.get(name, ())]))
    if "limit" in found:  # None for all
        limits = [each["limit"] for each in (own, its) if each.get("limit") is not None]
        found["limit"] = max(limits) if len(limits) == 2 else None
    for name in ("data", "beyond_positions"):
        if name in found:
            found[name] = own.get(name) or its.get(name)
    if "made_of" in found:
        first, second = (each.get("made_of", {}) for each in (own, its))
        tasks = {**first, **second}
        found["made_of"] = {task: {**second.get(task, {}), **first.get(task, {})} for task in tasks}
    return found


def _text(value: Any) -> str:
    """Return a setting's value as text short enough for a message."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "not given" if value is None else str(value)
