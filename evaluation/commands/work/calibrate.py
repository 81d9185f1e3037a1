"""Do the work of `kvpolicy calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kvpolicy.evaluation.calibration.choice import measure_tsp_distances
from kvpolicy.evaluation.calibration.distances import (
    Calibration,
    check_criterion,
)
from kvpolicy.evaluation.commands.calibrate import CalibrateOptions
from kvpolicy.evaluation.commands.terminal import load_shown, progress_bar, show_written
from kvpolicy.evaluation.comparison.plots import plot_calibration
from kvpolicy.evaluation.comparison.tables import calibration_legend, calibration_table
from kvpolicy.evaluation.defaults import NEEDLE
from kvpolicy.evaluation.extras import require
from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.options import PrefillOptions
from kvpolicy.evaluation.readable import check_positions, positions_notes
from kvpolicy.evaluation.results import (
    as_json,
    check_folder,
    check_threads,
    environment,
    write_all,
)
from kvpolicy.evaluation.tasks.prompts import (
    needle_prompts,
    read_prompts,
)
from kvpolicy.evaluation.text_files import read_text
from kvpolicy.policies import FastKV, TokenSelectivePropagation

FILES = ("calibrate.json", "calibrate.png")
# The parameters of FastKV's drop, except for the layer.
DROP = ("tsp_rate", "window_size", "kernel_size", "protect")


def run_calibrate(options: CalibrateOptions) -> None:
    """Do what `kvpolicy calibrate` does."""
    drop = _drop(options.policies)
    tsp_rate = drop.pop("tsp_rate", options.tsp_rate)
    _check(options, tsp_rate)
    torch.set_num_threads(options.threads)
    loaded = load_shown(options.model, dtype=options.dtype, device=options.device)
    asked = (
        needle_prompts(options.context, options.count, options.seed)
        if options.prompts is None
        else read_prompts(options.prompts, loaded.tokenizer)
    )
    longest = max(len(prompt.input_ids) for prompt in asked)
    check_positions(loaded, longest, beyond=options.beyond_positions, remedy="shorter prompts")
    inputs = [torch.tensor(prompt.input_ids) for prompt in asked]
    with progress_bar() as progress:
        distances = measure_tsp_distances(
            loaded.model, inputs, tsp_rate, options.max_layer, progress=progress, **drop
        )
    console = Console(highlight=False, markup=False)
    console.print(calibration_table(distances))
    console.print()
    for line in calibration_legend(distances):
        console.print(line, style="dim")
    for note in positions_notes(loaded.model, longest):
        console.print(note)
    out = options.out
    try:
        layer = distances.choose(options.criterion, options.tolerance)
    except ValueError as error:
        left = "" if out is None else f"; nothing is written to {out}"
        raise ValueError(f"no TSP layer is chosen{left}: {error}") from None
    chosen = Calibration(layer, distances, options.criterion, options.tolerance)
    console.print(f"\n{_sentence(chosen)}")
    if out is not None:
        source: dict[str, Any] = (
            {"seed": options.seed} if options.prompts is None else {"prompts": str(options.prompts)}
        )
        source |= {"parameters": drop} if drop else {}
        _write(chosen, loaded, source, out)
        show_written(out, FILES)


def _drop(options: PrefillOptions) -> dict[str, Any]:
    """Return the given parameters of FastKV's token drop; ValueError for any other option.

    Raises:
        ValueError: One is given that a drop does not have.
    """
    evicts = "it measures only the drop, which evicts no keys and values"
    if any(name.replace("-", "_") != "fastkv" for name in options.names):
        options.refuse("calibrate", names="it chooses the layer of fastkv")
    options.refuse("calibrate", rates=evicts, tokens=evicts, parts="it chooses the layer of fastkv")
    for name in options.parameters:
        if name not in DROP:
            raise ValueError(
                f"--set must name one of {', '.join(DROP)} in kvpolicy calibrate, got {name}"
            )
    try:
        # What is kept does not matter here, but must not exceed what goes on to later layers.
        FastKV(retention_tokens=1, **options.parameters)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return dict(options.parameters)


def _check(options: CalibrateOptions, tsp_rate: float) -> None:
    """Check the options of `kvpolicy calibrate` that need no loaded model."""
    check_threads(options.threads)
    if options.out is not None:
        check_folder(options.out, FILES)
        require("matplotlib", extra="plot")
    check_criterion(options.criterion, options.tolerance)
    TokenSelectivePropagation(tsp_rate=tsp_rate)
    if options.prompts is not None:
        read_text(options.prompts, "prompts file")
    elif options.model != NEEDLE:
        raise ValueError(
            f"--prompts-file must be given with --model {options.model}, since the needle task "
            "uses the bundled model's own tokens"
        )


def _sentence(chosen: Calibration) -> str:
    if chosen.criterion == "earliest":
        return (
            f"TSP layer {chosen.layer}: the earliest with a normalised distance of at most "
            f"{chosen.tolerance:g}."
        )
    last = chosen.distances.layers[-1].tsp_layer
    return f"TSP layer {chosen.layer}: the smallest distance of layers 0 to {last}."


def _write(chosen: Calibration, loaded: Loaded, source: dict[str, Any], out: Path) -> None:
    data = {
        "model": loaded.name,
        "dtype": loaded.dtype,
        **source,
        **environment(loaded.model.device),
        **chosen.as_data(),
    }
    contents = (as_json(data), plot_calibration(chosen))
    write_all(out, dict(zip(FILES, contents, strict=True)))
