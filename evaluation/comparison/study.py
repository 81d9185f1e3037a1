"""Run a study: check settings, run a comparison and sweeps, write numbers and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation.calibration.choice import select_tsp_layer
from kvpolicy.evaluation.calibration.distances import Calibration
from kvpolicy.evaluation.chosen import chosen_variants
from kvpolicy.evaluation.comparison.picture import plot_comparison
from kvpolicy.evaluation.comparison.plots import plot_sweep
from kvpolicy.evaluation.comparison.rows import (
    FULL_CONTEXT,
    Comparison,
    Row,
    compare,
    comparison_of,
)
from kvpolicy.evaluation.comparison.settings import Settings
from kvpolicy.evaluation.comparison.shown import timed_labels
from kvpolicy.evaluation.comparison.speed import MIN_ROUNDS
from kvpolicy.evaluation.comparison.sweep import (
    SEED_OFFSET,
    RateSweep,
    Sweep,
    sweep_rates,
    sweep_tsp_layers,
)
from kvpolicy.evaluation.comparison.timed import Timed, random_llama
from kvpolicy.evaluation.defaults import CALIBRATION_SEED_OFFSET, NEEDLE
from kvpolicy.evaluation.extras import require
from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.readable import check_positions, positions_notes
from kvpolicy.evaluation.results import (
    as_json,
    check_folder,
    check_threads,
    environment,
    write_all,
)
from kvpolicy.evaluation.tasks.prompts import (
    Prompt,
    needle_prompts,
    read_prompts,
)
from kvpolicy.evaluation.text_files import read_text
from kvpolicy.evaluation.variant import Variant
from kvpolicy.policies import FastKV, TokenSelectivePropagation

# Prompts that a TSP layer is calibrated on: distances vary less than answers do.
CALIBRATION_COUNT = 16
# The last where TSP layers are swept.
FILES = ("compare.json", "compare.png", "tsp_layers.png")


@attrs.frozen
class Study:
    """The results of a comparison and its sweeps, with the settings and the machine.

    Args:
        settings: What was asked for.
        environment: Versions and machine; see `kvpolicy.evaluation.results.environment`.
        dtype: The model's.
        comparison: The policies side by side.
        sweep: Accuracy by TSP layer, if asked for.
        rate_sweep: Accuracy by TSP rate and retention rate, if asked for.
        notes: What a reader has to know of the choices made.
        finished: Whether all rows and sweeps that were asked for are there.
    """

    settings: Settings
    environment: dict[str, Any]
    dtype: str
    comparison: Comparison
    sweep: Sweep | None
    rate_sweep: RateSweep | None
    notes: tuple[str, ...]
    finished: bool = True

    def as_data(self) -> dict[str, Any]:
        """Return the study's settings and results as a dict for JSON."""
        settings = attrs.asdict(self.settings)
        del settings["_rounds"], settings["thorough"]  # what they come to is there
        settings["policies"] = self.settings.asked_policies.names
        for name in ("rates", "rounds", "again", "timing_seconds"):
            settings[name] = getattr(self.settings, name)
        prompts = self.settings.prompts
        settings["prompts"] = self.settings.model if prompts is None else str(prompts)
        settings["tsp_layer"] = self.settings.effective_tsp_layer
        settings["dtype"] = self.dtype
        data = {"settings": settings, **self.environment, **self.comparison.as_data()}
        data["finished"] = self.finished
        data["notes"] = list(self.notes)
        for name, sweep in (("sweep", self.sweep), ("rate_sweep", self.rate_sweep)):
            if sweep is not None:
                seed = None if self.settings.prompts else self.settings.seed + SEED_OFFSET
                data[name] = {"seed": seed, **sweep.as_data()}
        return data


def headline(settings: Settings, loaded: Loaded) -> list[str]:
    """Return lines on what a comparison will measure: versions, model, machine and extent.

    Args:
        settings: What to compare.
        loaded: The model.
    """
    found = environment(loaded.model.device)
    versions, machine = found["versions"], found["machine"]
    threads, rounds = settings.threads, settings.rounds
    return [
        f"kvpolicy {versions['kvpolicy']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}",
        f"model {settings.model} in {loaded.dtype} on {machine.get('gpu', machine['device'])}, "
        f"{threads} thread{'s' * (threads > 1)}, {machine['processor']}",
        f"{asked(settings)}; first all speeds, in {rounds} round{'s' * (rounds > 1)}, then answers",
    ]


def asked(settings: Settings, count: int | None = None) -> str:
    """Return words on the prompts that a comparison asks.

    Args:
        settings: What is compared.
        count: How many prompts the user's file holds; None while that is not known.
    """
    if settings.prompts is not None:
        return f"{'the' if count is None else count} prompts of {settings.prompts}"
    return f"{settings.count} needle prompts of {settings.context:,} tokens"


def check(settings: Settings, out: Path | None = None) -> list[Variant]:
    """Check a comparison's settings before a model is loaded, and build the policies.

    Args:
        settings: What to compare.
        out: The folder that results are to go to.

    Raises:
        ValueError: A setting is out of its range, or a name or file does not exist.
        MissingExtraError: Pictures are wanted and matplotlib is not installed.
    """
    chosen = chosen_variants(
        settings.asked_policies, settings.rates, tsp_layer=settings.effective_tsp_layer
    )
    if out is not None:
        check_folder(out, FILES if settings.sweep else FILES[:2])
        require("matplotlib", extra="plot")
    check_threads(settings.threads)
    if settings.prompts is not None:
        read_text(settings.prompts, "prompts file")
    elif settings.model != NEEDLE:
        raise ValueError(
            f"--prompts-file must be given with --model {settings.model}: prompts are made for "
            f"{NEEDLE} alone, in the bundled model's own tokens"
        )
    return chosen


def check_loaded(settings: Settings, chosen: Sequence[Variant], loaded: Loaded) -> list[Prompt]:
    """Check a comparison's settings against the loaded model, before minutes of measuring.

    Args:
        settings: What to compare.
        chosen: The policies, from `check`.
        loaded: The model.

    Returns:
        The prompts.

    Raises:
        ValueError: A policy does not fit the model, a line of the file of prompts is wrong, or a
            prompt exceeds the model's positions.
    """
    num_layers = loaded.model.config.num_hidden_layers
    for variant in chosen:
        variant.check_model(num_layers)
    if settings.sweep or settings.sweep_rates:
        FastKV(tsp_layer=settings.effective_tsp_layer).check_model(num_layers)
    prompts = _prompts(settings, loaded, settings.seed)
    for prompt in prompts:
        check_positions(
            loaded,
            len(prompt.input_ids),
            max(prompt.max_new_tokens, settings.new_tokens),
            beyond=settings.beyond_positions,
            remedy="shorter prompts, fewer --answer-tokens",
        )
    return prompts


def run(
    settings: Settings,
    chosen: Sequence[Variant],
    loaded: Loaded,
    progress: Progress = silent,
    unfinished: Callable[[Study], None] | None = None,
) -> Study:
    """Compare policies, and calibrate and sweep if the settings ask; sets torch's thread count.

    Args:
        settings: What to compare.
        chosen: The policies, from `check`.
        loaded: The model.
        progress: Told how far it is.
        unfinished: Called with what is done where the work ends early, as by Ctrl-C, before that is
            raised; not without a row.
    """
    torch.set_num_threads(settings.threads)
    prompts = check_loaded(settings, chosen, loaded)
    notes = _notes(settings, chosen, loaded, prompts)
    # First, since it is short and says at once what is wrong with a file of prompts.
    calibration = _calibration(settings, loaded, notes, progress) if settings.sweep else None
    timed = _timed(settings, loaded)
    rows: list[Row] = []

    def found(comparison: Comparison, *more: str) -> Study:
        said = (*notes, *_timing_notes(settings, comparison), *more)
        measured_on = environment(loaded.model.device)
        return Study(settings, measured_on, loaded.dtype, comparison, None, None, said)

    try:
        comparison = compare(
            loaded.model,
            prompts,
            chosen,
            rounds=settings.rounds,
            new_tokens=settings.new_tokens,
            timing_seconds=settings.timing_seconds,
            again=settings.again,
            timed=timed,
            timed_labels=timed_labels(chosen),
            progress=progress,
            row_done=rows.append,
        )
        sweep, rate_sweep = _sweeps(settings, loaded, calibration, progress)
    except BaseException:  # Ctrl-C is one; minutes of work shall not be lost
        if unfinished is not None and rows:
            labels = [
                FULL_CONTEXT.label,
                *(it.label for it in chosen if it.name != FULL_CONTEXT.name),
            ]
            done = comparison_of(rows, timed)
            unfinished(attrs.evolve(found(done, _unfinished(labels, rows)), finished=False))
        raise
    return attrs.evolve(found(comparison), sweep=sweep, rate_sweep=rate_sweep)


def _unfinished(labels: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a note on which rows a stopped comparison lacks."""
    missing = labels[len(rows) :]
    left = f"without {', '.join(missing)}" if missing else "without the sweep"
    return f"Unfinished: stopped after {len(rows)} of {len(labels)} rows, {left}."


def write(study: Study, folder: Path) -> list[str]:
    """Write a comparison's numbers and pictures into its folder; return the files' names."""
    contents = [
        as_json(study.as_data()),
        plot_comparison(study.as_data()),
    ]
    if study.sweep is not None:
        contents.append(plot_sweep(study.sweep))
    files = dict(zip(FILES, contents, strict=False))
    write_all(folder, files)
    return list(files)


def _timed(settings: Settings, loaded: Loaded) -> Timed | None:
    """Return the model and prompt to time; None for the model and prompts that answer."""
    if not settings.own_speed_model:
        return None
    found = random_llama(loaded.model.config.num_hidden_layers, settings.speed_context)
    return attrs.evolve(found, model=found.model.to(loaded.model.device))


def _prompts(settings: Settings, loaded: Loaded, seed: int) -> list[Prompt]:
    if settings.prompts is None:
        return needle_prompts(settings.context, settings.count, seed)
    return read_prompts(settings.prompts, loaded.tokenizer)


def _calibration(
    settings: Settings, loaded: Loaded, notes: list[str], progress: Progress
) -> Calibration | None:
    """Choose the layer after which FastKV drops tokens, on separate prompts; None if impossible."""
    if settings.prompts is None:
        seed = settings.seed + CALIBRATION_SEED_OFFSET
        prompts = needle_prompts(settings.context, CALIBRATION_COUNT, seed)
    else:
        prompts = read_prompts(settings.prompts, loaded.tokenizer)[:CALIBRATION_COUNT]
    inputs = [torch.tensor(prompt.input_ids) for prompt in prompts]
    window, shortest = FastKV().propagation.protected_tail, min(map(len, inputs))
    if shortest <= window:
        notes.append(
            f"No TSP layer was calibrated: prompts must be longer than the window of {window} "
            f"tokens for that, the shortest has {shortest}."
        )
        return None
    try:
        return select_tsp_layer(loaded.model, inputs, progress=progress)
    except UnsupportedModelError as error:
        notes.append(f"No TSP layer was calibrated: {error}.")
        return None


def _sweeps(
    settings: Settings, loaded: Loaded, calibration: Calibration | None, progress: Progress
) -> tuple[Sweep | None, RateSweep | None]:
    """Run the requested sweeps of FastKV's parameters, on prompts the comparison does not use."""
    if not (settings.sweep or settings.sweep_rates):
        return None, None
    model, layer = loaded.model, settings.effective_tsp_layer
    prompts = _prompts(settings, loaded, settings.seed + SEED_OFFSET)
    sweep = rate_sweep = None
    if settings.sweep:
        sweep = sweep_tsp_layers(
            model, prompts, settings.rates, calibration=calibration, progress=progress
        )
    if settings.sweep_rates:
        rate_sweep = sweep_rates(model, prompts, tsp_layer=layer, progress=progress)
    return sweep, rate_sweep


def _notes(
    settings: Settings, chosen: Sequence[Variant], loaded: Loaded, prompts: Sequence[Prompt]
) -> list[str]:
    notes = []
    if settings.tsp_layer is not None:
        why = "as asked for"
    elif settings.effective_tsp_layer is not None:
        why = "chosen from the sweep on other prompts (see --sweep)"
    else:
        why = "its default"
    by_layers: dict[str, list[str]] = {}
    for name, policy in {each.name: each.policy for each in chosen if _has_tsp_layer(each)}.items():
        layers = sorted(policy.propagation.acting_layers(loaded.model.config.num_hidden_layers))
        by_layers.setdefault(", ".join(map(str, layers)), []).append(name)
    for layers_said, names in by_layers.items():
        verb = "drops" if len(names) == 1 else "drop"
        notes.append(f"{', '.join(names)} {verb} tokens after layer {layers_said}, {why}.")
    raised = [
        each
        for each in chosen
        if each.retention_rate is not None
        and each.parameters.get("tsp_rate") == each.retention_rate
    ]
    for variant in raised:
        notes.append(
            f"{variant.label}: tsp_rate raised to {variant.parameters['tsp_rate']:g}, since layers "
            "after the drop cannot keep more than reaches them."
        )
    notes += positions_notes(loaded.model, max(len(prompt.input_ids) for prompt in prompts))
    if (settings.sweep or settings.sweep_rates) and settings.prompts is not None:
        notes.append(
            "Sweeps and calibration are on the same prompts as the comparison: there is only one "
            "file."
        )
    return notes


def _has_tsp_layer(variant: Variant) -> bool:
    return isinstance(variant.policy.propagation, TokenSelectivePropagation)


def _timing_notes(settings: Settings, comparison: Comparison) -> list[str]:
    notes = []
    rounds = len(comparison.baseline.prefill.wall_ms)
    if rounds < settings.rounds:
        notes.append(
            f"Timing ended after {settings.timing_seconds:g} s with {rounds} of {settings.rounds} "
            "rounds: the machine is slow or busy. --rounds has no such limit."
        )
    unsteady = sum(not speed.steady for speed in comparison.speeds)
    if unsteady and rounds < MIN_ROUNDS:
        notes.append(f"Fewer than {MIN_ROUNDS} rounds of timing say nothing about speed.")
    elif unsteady:
        notes.append(
            f"Left out, since rounds disagree: {unsteady} of {len(comparison.speeds)} speeds. Is "
            "the machine busy? Try again when it is idle, or with fewer --threads."
        )
    return notes
