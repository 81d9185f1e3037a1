"""Run `kvpolicy calibrate`: choose the layer after which FastKV may drop tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from kvpolicy.evaluation.calibration.choice import measure_tsp_distances
from kvpolicy.evaluation.calibration.distances import (
    CRITERIA,
    TOLERANCE,
    Calibration,
    check_criterion,
)
from kvpolicy.evaluation.commands.options import (
    PolicyOption,
    PolicyOptions,
    PropagationOption,
    ProtectOption,
    RateOption,
    RetentionTokensOption,
    ScorerOption,
    SelectorOption,
    SetOption,
    policy_options,
)
from kvpolicy.evaluation.commands.terminal import (
    BeyondPositionsOption,
    DeviceOption,
    DtypeOption,
    ThreadsOption,
    load_shown,
    progress_bar,
)
from kvpolicy.evaluation.comparison.plots import plot_calibration
from kvpolicy.evaluation.comparison.sweep import CALIBRATION_SEED_OFFSET
from kvpolicy.evaluation.comparison.tables import calibration_legend, calibration_table
from kvpolicy.evaluation.extras import require
from kvpolicy.evaluation.models import NEEDLE, Loaded
from kvpolicy.evaluation.readable import check_positions, positions_notes
from kvpolicy.evaluation.results import (
    check_folder,
    check_threads,
    default_threads,
    environment,
    write_all,
)
from kvpolicy.evaluation.tasks.prompts import (
    MIN_NEEDLE_CONTEXT,
    needle_prompts,
    read_prompts,
    read_text,
)
from kvpolicy.policies import FastKV, TokenSelectivePropagation

FILES = ("calibrate.json", "calibrate.png")
# Parameters of FastKV that its drop has, beside the layer.
DROP = ("tsp_rate", "window_size", "kernel_size", "protect")


def calibrate(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="A folder, a Hub name, or a bundled model: needle, ruler_words, long_answers.",
        ),
    ] = NEEDLE,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts as for compare, whose answers are not looked at; default: needle task.",
        ),
    ] = None,
    context: Annotated[
        int,
        typer.Option(
            min=MIN_NEEDLE_CONTEXT, metavar="N", help="Tokens of a needle prompt, at least 64."
        ),
    ] = 1024,
    count: Annotated[
        int, typer.Option(min=2, metavar="N", help="Needle prompts: half one-hop, half two-hop.")
    ] = 16,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of the needle prompts; compare reports on others.")
    ] = CALIBRATION_SEED_OFFSET,
    tsp_rate: Annotated[
        float, typer.Option(metavar="RATE", help="Fraction of the context that goes on, in (0, 1].")
    ] = 0.2,
    policy: PolicyOption = None,
    rate: RateOption = None,
    retention_tokens: RetentionTokensOption = None,
    protect: ProtectOption = None,
    parameters: SetOption = None,
    scorer: ScorerOption = None,
    selector: SelectorOption = None,
    propagation: PropagationOption = None,
    max_layer: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="The last candidate; default: FastKV's own layer."),
    ] = None,
    criterion: Annotated[
        str, typer.Option(metavar="NAME", help=f"How to choose: {' or '.join(CRITERIA)}.")
    ] = "argmin",
    tolerance: Annotated[
        float,
        typer.Option(metavar="X", help="Normalised distance that earliest takes for close."),
    ] = TOLERANCE,
    threads: ThreadsOption = None,
    beyond_positions: BeyondPositionsOption = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for calibrate.json and calibrate.png."),
    ] = None,
) -> None:
    """Choose FastKV's TSP layer by how little the drop moves the output.

    Nothing is evicted: of the options of policies, those of the drop count.
    """
    options = policy_options(
        policy,
        rate,
        retention_tokens,
        protect,
        parameters,
        scorer=scorer,
        selector=selector,
        propagation=propagation,
    )
    drop = _drop(options)
    tsp_rate = drop.pop("tsp_rate", tsp_rate)
    threads = check_threads(threads or default_threads())
    _check(model, prompts, tsp_rate, criterion, tolerance, out)
    torch.set_num_threads(threads)
    loaded = load_shown(model, dtype, device)
    asked = (
        needle_prompts(context, count, seed)
        if prompts is None
        else read_prompts(prompts, loaded.tokenizer)
    )
    longest = max(len(prompt.input_ids) for prompt in asked)
    check_positions(loaded, longest, beyond=beyond_positions, remedy="shorter prompts")
    inputs = [torch.tensor(prompt.input_ids) for prompt in asked]
    with progress_bar() as progress:
        distances = measure_tsp_distances(
            loaded.model, inputs, tsp_rate, max_layer, progress=progress, **drop
        )
    console = Console(highlight=False, markup=False)
    console.print(calibration_table(distances))
    console.print()
    for line in calibration_legend(distances):
        console.print(line, style="dim")
    for note in positions_notes(loaded.model, longest):
        console.print(note)
    try:
        layer = distances.choose(criterion, tolerance)
    except ValueError as error:
        left = "" if out is None else f"; nothing is written to {out}"
        raise ValueError(f"no TSP layer is chosen{left}: {error}") from None
    chosen = Calibration(layer, distances, criterion, tolerance)
    console.print(f"\n{_sentence(chosen)}")
    if out is not None:
        source: dict[str, Any] = {"seed": seed} if prompts is None else {"prompts": str(prompts)}
        source |= {"parameters": drop} if drop else {}
        _write(chosen, loaded, source, out)
        written = Console(highlight=False, markup=False, soft_wrap=True)
        written.print(f"\nwritten to {out}: {', '.join(FILES)}")


def _drop(options: PolicyOptions) -> dict[str, Any]:
    """Return the parameters of the drop that are given; refuse options that a drop does not have.

    Raises:
        ValueError: One is given that a drop does not have.
    """
    evicts = "it measures the drop alone, which evicts no keys and values"
    if any(name.replace("-", "_") != "fastkv" for name in options.names):
        options.refuse("calibrate", names="it chooses the layer of fastkv")
    options.refuse("calibrate", rates=evicts, tokens=evicts, parts="it chooses the layer of fastkv")
    for name in options.parameters:
        if name not in DROP:
            raise ValueError(
                f"--set must name one of {', '.join(DROP)} in kvpolicy calibrate, got {name}"
            )
    try:
        # Whatever is kept is no matter here, and must not exceed what goes on.
        FastKV(retention_tokens=1, **options.parameters)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return dict(options.parameters)


def _check(
    model: str,
    prompts: Path | None,
    tsp_rate: float,
    criterion: str,
    tolerance: float,
    out: Path | None,
) -> None:
    """Check what can be checked before a model is loaded."""
    if out is not None:
        check_folder(out, FILES)
        require("matplotlib", extra="plot")
    check_criterion(criterion, tolerance)
    TokenSelectivePropagation(tsp_rate=tsp_rate)
    if prompts is not None:
        read_text(prompts, "prompts file")
    elif model != NEEDLE:
        raise ValueError(
            f"--prompts must be given with --model {model}: the needle task is in the bundled "
            "model's own tokens"
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
    text = json.dumps(data, indent=2, allow_nan=False)
    contents = (text.encode(), plot_calibration(chosen))
    write_all(out, dict(zip(FILES, contents, strict=True)))
