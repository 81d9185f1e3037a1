"""Join results folders, such as those of several machines, for one report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from kvpolicy.evaluation.suite.folder import Results, Source, load
from kvpolicy.evaluation.suite.sample import Cell, Sample

# How many contradicting samples a message shows.
SHOWN = 3


def load_joined(folders: Sequence[Path | str]) -> Results:
    """Read several results folders as one, without changing them.

    Where two folders have the same sample, the first one's counts; they may differ in times alone.

    Args:
        folders: As `kvpolicy eval` wrote them, at least one.

    Raises:
        ValueError: There is none, or one is no folder of results; they are of different models,
            chat templates or the like, or of different prompts; or samples contradict each other.
    """
    if not folders:
        raise ValueError("results must name at least one folder, got none")
    first, *others = [load(folder) for folder in folders]
    for each in others:
        first = _joined(first, each)
    return first


def differences(sources: Sequence[Source]) -> list[str]:
    """List how folders differ in machine, threads and versions of libraries, and in model names."""
    found: list[str] = []
    first, *others = sources
    for each in others:
        own, its = (str(source.description.settings.get("model")) for source in (first, each))
        unlike = first.description.circumstances(each.description)
        unlike += [("model", own, its)] if own != its else []
        found += [
            f"{name}: {was} in {first.folder}, {got} in {each.folder}" for name, was, got in unlike
        ]
    return found


def _joined(own: Results, its: Results) -> Results:
    names = f"{own.sources[0].folder} and {its.sources[0].folder}"
    conflicts = own.description.conflicts(its.description)
    if conflicts:
        raise ValueError(
            f"results must be of the same model, asked in the same way, got {names}, where "
            f"{'; '.join(conflicts)}"
        )
    _check_prompts(own, its, names)
    there = {(each.cell, each.document): each for each in own.samples}
    new, contradictions = [], []
    for sample in its.samples:
        known = there.get((sample.cell, sample.document))
        if known is None:
            new.append(sample)
        else:
            contradictions += _contradictions(known, sample)
    if contradictions:
        more = len(contradictions) - SHOWN
        raise ValueError(
            f"results must not contradict each other, got {names}, where "
            f"{'; '.join(contradictions[:SHOWN])}{f'; and {more} more' if more > 0 else ''}; "
            "report on each alone, or ask each task on one machine"
        )
    return Results(
        own.description.joined(its.description),
        (*own.samples, *new),
        (*own.sources, *its.sources),
    )


def _check_prompts(own: Results, its: Results, names: str) -> None:
    """Check that documents of the same number have the same prompts in both folders."""

    def digests(results: Results) -> dict[tuple[str, int | None, int], str]:
        return {
            (each.cell.task, each.cell.length, each.document): each.prompt_digest
            for each in results.samples
        }

    there = digests(own)
    for (task, length, number), digest in digests(its).items():
        if there.get((task, length, number), digest) != digest:
            where = task if length is None else f"{task} at {length:,} tokens"
            raise ValueError(
                f"results must be of the same prompts, got {names}, where document {number} of "
                f"{where} is another; were they made by other data or another tokenizer?"
            )


def _contradictions(own: Sample, its: Sample) -> list[str]:
    """Describe how two samples of one document differ, times aside, in one line; else empty."""
    first, second = _told(own), _told(its)
    unlike = [
        f"{name} was {first[name]!r}, got {second[name]!r}"
        for name in first
        if first[name] != second[name]
    ]
    cell: Cell = own.cell
    return [f"of {cell}, document {own.document}, {', '.join(unlike)}"] if unlike else []


def _told(sample: Sample) -> dict[str, object]:
    answer = attrs.asdict(sample.answer)
    del answer["prefill_seconds"], answer["total_seconds"]
    return {**answer, "references": sample.references, "depth": sample.depth}
