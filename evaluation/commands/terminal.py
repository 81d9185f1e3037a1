"""What the commands share at the terminal: progress on stderr, and the options of every model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from kvpolicy.evaluation.models import DTYPES, Loaded, load
from kvpolicy.evaluation.progress import Progress

DtypeOption = Annotated[
    str, typer.Option(metavar="NAME", help=f"auto (the checkpoint's own), {', '.join(DTYPES)}.")
]
DeviceOption = Annotated[
    str, typer.Option(metavar="NAME", help="Where to compute, as torch names it: cpu, cuda.")
]


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr that is gone when the work is done; yields what to tell."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    # Elsewhere than on a terminal all that is left of a bar would be an empty line.
    disable = not console.is_terminal
    with Bars(*columns, console=console, transient=True, disable=disable) as bars:
        task = bars.add_task("starting", total=None)

        def tell(stage: str, done: int, total: int) -> None:
            bars.update(task, description=stage, completed=done, total=total)

        yield tell


def load_shown(name: str, dtype: str, device: str) -> Loaded:
    """Load a model while stderr says so.

    Raises:
        ValueError: See `kvpolicy.evaluation.models.load`.
    """
    with Console(stderr=True).status(f"loading model {name}"):
        from transformers.utils import logging as transformers_logging

        # Their warnings and bars would run through ours; what fails is raised all the same.
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        return load(name, dtype=dtype, device=device)
