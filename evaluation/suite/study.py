"""Prepare an evaluation, and answer what its folder lacks, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import attrs

from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.progress import Progress
from kvpolicy.evaluation.suite.answering import answer, answering_model, check_prompts
from kvpolicy.evaluation.suite.folder import FULL_CONTEXT, Cell, Sample, save_cell
from kvpolicy.evaluation.suite.tasks import Prompts, make_prompts
from kvpolicy.evaluation.variant import Variant
from kvpolicy.registry import build_policy


def with_full_context(chosen: Sequence[Variant]) -> list[Variant]:
    """Return policies with full context first, each label once."""
    full = Variant(FULL_CONTEXT, build_policy(FULL_CONTEXT))
    return [*{each.label: each for each in (full, *chosen)}.values()]


def prepare(
    loaded: Loaded,
    tasks: Mapping[str, Path],
    lengths: Sequence[int],
    chosen: Sequence[Variant],
    *,
    limit: int | None,
    chat: bool,
    later: bool,
    beyond: bool,
) -> list[Prompts]:
    """Make all prompts, and check that the model can read each of them under every policy.

    The arguments are those of `make_prompts` and `check_prompts`.

    Raises:
        ValueError: See there.
    """
    lm = answering_model(loaded, FULL_CONTEXT)
    prompts = make_prompts(tasks, lengths, lm, limit=limit, chat=chat)
    check_prompts(loaded, prompts, chosen, lm, later=later, beyond=beyond)
    return prompts


def fill(
    folder: Path,
    cells: Mapping[str, Cell],
    loaded: Loaded,
    prompts: Sequence[Prompts],
    chosen: Sequence[Variant],
    later: bool,
    batch_size: int,
    progress: Progress,
) -> Iterator[str]:
    """Answer the documents that a folder lacks, and keep each batch of them at once.

    All policies answer a task before the next one begins, so that what is there can be compared.

    Args:
        folder: The folder, opened.
        cells: What it holds, by file name.
        loaded: The model.
        prompts: What to ask.
        chosen: The policies.
        later: Whether questions are asked after the policy has chosen.
        batch_size: Documents that are answered at once.
        progress: Told of every batch.

    Yields:
        A line for each finished cell.

    Raises:
        ValueError: What the folder holds was asked with another prompt or policy; before anything
            is answered.
    """
    asked = []
    for each in prompts:
        for variant in chosen:
            cell = Cell(each.name, each.length, later, variant.label, repr(variant.policy))
            asked.append((each, variant, _found(folder, cells.get(cell.file, cell), cell, each)))
    total = sum(len(each.requests) for each, _, _ in asked)
    answered = 0
    for each, variant, cell in asked:
        there = {sample.document for sample in cell.samples}
        missing = [number for number in range(len(each.requests)) if number not in there]
        answered += len(each.requests) - len(missing)
        lm = answering_model(loaded, variant.policy, later=later, batch_size=batch_size)
        for start in range(0, len(missing), batch_size):
            progress(str(cell), answered, total)
            batch = missing[start : start + batch_size]
            cell = attrs.evolve(cell, samples=(*cell.samples, *answer(each, batch, lm)))
            save_cell(folder, cell)
            answered += len(batch)
        metric, score = next(iter(cell.samples[0].scores)), [*map(_main, cell.samples)]
        seconds = fmean(sample.total_seconds for sample in cell.samples)
        kept = f", {len(there):,} of them kept" if there else ""
        yield f"{cell}: {metric} {fmean(score):.3f} of {len(score):,}, {seconds:.2g} s each{kept}"


def _main(sample: Sample) -> float:
    return next(iter(sample.scores.values()))


def _found(folder: Path, there: Cell, asked: Cell, prompts: Prompts) -> Cell:
    """Return what a folder holds of a cell, if it was asked in the same way."""
    if there.policy != asked.policy:
        raise ValueError(
            f"out must be a folder of the same policies, got {folder}, where {asked.method} was "
            f"{there.policy}, got {asked.policy}; give another --out"
        )
    for sample in there.samples:
        number = sample.document
        if number < len(prompts.requests) and prompts.digest(number) != sample.prompt:
            raise ValueError(
                f"out must be a folder of the same prompts, got {folder}, where document {number} "
                f"of {asked.place} was another; has the task or its data changed? Give another --out"
            )
    return there
