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
            "File of prompts, as for compare; answers are ignored. Default: needle prompts.",
            ("--prompts-file",),
            metavar="FILE",
        ),
    ] = None
    seed: Annotated[int, Option("Random seed of the needle prompts; compare draws others.")] = (
        CALIBRATION_SEED_OFFSET
    )
    tsp_rate: Annotated[
        float,
        Option(
            "Fraction of the prompt's tokens that later layers read after the drop, in (0, 1].",
            metavar="RATE",
        ),
    ] = 0.2
    policies: PrefillOptions
    max_layer: Annotated[
        int | None, Option("Last layer to try; default: FastKV's own layer.", min=0)
    ] = None
    criterion: Annotated[
        str, Option(f"How to choose the layer: {' or '.join(CRITERIA)}.", metavar="NAME")
    ] = "argmin"
    tolerance: Annotated[
        float,
        Option("With earliest, the largest normalised distance that is close enough.", metavar="X"),
    ] = TOLERANCE
    threads: Annotated[int, THREADS] = attrs.field(factory=default_threads)
    out: Annotated[
        Path | None, Option("Folder to write calibrate.json and calibrate.png to.", metavar="DIR")
    ] = None


def calibrate(options: CalibrateOptions) -> None:
    """Choose the layer after which FastKV drops tokens, so that the output changes little.

    No keys and values are evicted, so that only the options of the drop have an effect.
    """
    work("calibrate", options)
