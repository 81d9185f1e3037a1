"""Say where results come from: the folders, with their machines and versions of libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.evaluation.suite.folder import Results, Source

ABSENT = "\N{EN DASH}"
SAMPLES = "samples"


@attrs.frozen
class Fact:
    """One thing about the folders that results come from, with its value in each.

    Args:
        name: What it is.
        values: As text, by folder.
    """

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """True if the folders do not have it in common, and should."""
        return self.name != SAMPLES and len(set(self.values)) > 1


def sources_of(results: Results) -> tuple[Source, ...]:
    """Return the folders that results come from; one without a name where they are of none."""
    own = Source(Path("results"), results.description, len(results.samples))
    return results.sources or (own,)


def facts_of(sources: Sequence[Source]) -> list[Fact]:
    """Return the model, machine and versions of folders, those first that tell most."""
    found = [
        Fact("folder", tuple(str(each.folder) for each in sources)),
        Fact(SAMPLES, tuple(f"{each.samples:,}" for each in sources)),
        _fact("model", sources, _setting("model")),
        _fact("content of the model", sources, _setting("fingerprint")),
        _fact("precision", sources, _setting("dtype")),
        _fact("machine", sources, lambda each: machine_of(each) or None),
        _fact("device", sources, _setting("device")),
        _fact("threads", sources, _setting("threads")),
        _fact("prompts at once", sources, _setting("batch_size")),
    ]
    versions = [each.description.environment.get("versions", {}) for each in sources]
    for name in dict.fromkeys(name for each in versions for name in each):
        found.append(Fact(name, tuple(str(each.get(name, ABSENT)) for each in versions)))
    return [each for each in found if set(each.values) != {ABSENT}]


def machine_of(source: Source) -> str:
    """Name a folder's machine by its GPU or processor and its system; empty if it is not known."""
    machine: Mapping[str, Any] = source.description.environment.get("machine", {})
    cpus = machine.get("cpus")
    told = [
        machine.get("gpu"),
        machine.get("processor"),
        None if cpus is None else f"{cpus} CPU{'s' * (cpus != 1)}",
        machine.get("system"),
    ]
    return ", ".join(str(each) for each in told if each)


def _setting(name: str) -> Callable[[Source], Any]:
    return lambda source: source.description.settings.get(name)


def _fact(name: str, sources: Sequence[Source], value: Callable[[Source], Any]) -> Fact:
    values = [value(each) for each in sources]
    return Fact(name, tuple(ABSENT if each is None else str(each) for each in values))
