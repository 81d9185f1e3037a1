"""Run `kvpolicy calibrate`: choose the layer after which FastKV may drop tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.calibration.distances import CRITERIA, TOLERANCE
from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.defaults import CALIBRATION_SEED_OFFSET
from kvpolicy.evaluation.options import THREADS, NeedleOptions, Option, PrefillOptions
from kvpolicy.evaluation.results import default_threads


@attrs.frozen(kw_only=True)
class CalibrateOptions(NeedleOptions):
    """The command-line options of `kvpolicy calibrate`."""

    prompts: Annotated[
        Path | None,
        Option(
            "Prompts as for compare, whose answers are not looked at; default: needle task.",
            ("--prompts-file",),
            metavar="FILE",
            earlier="--prompts",
        ),
    ] = None
    seed: Annotated[int, Option("Of the needle prompts; compare reports on others.")] = (
        CALIBRATION_SEED_OFFSET
    )
    tsp_rate: Annotated[
        float, Option("Fraction of the context that goes on, in (0, 1].", metavar="RATE")
    ] = 0.2
    policies: PrefillOptions
    max_layer: Annotated[
        int | None, Option("The last candidate; default: FastKV's own layer.", min=0)
    ] = None
    criterion: Annotated[
        str, Option(f"How to choose: {' or '.join(CRITERIA)}.", metavar="NAME")
    ] = "argmin"
    tolerance: Annotated[
        float, Option("Normalised distance that earliest takes for close.", metavar="X")
    ] = TOLERANCE
    threads: Annotated[int, THREADS] = attrs.field(factory=default_threads)
    out: Annotated[
        Path | None, Option("Folder for calibrate.json and calibrate.png.", metavar="DIR")
    ] = None


def calibrate(options: CalibrateOptions) -> None:
    """Choose the layer after which FastKV drops tokens, so that the output changes little.

    Nothing is evicted: of the options of policies, those of the drop count.
    """
    work("calibrate", options)
