"""Share terminal code among the commands: consoles, progress, and loading a model."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from kvpolicy.evaluation.models import DEFAULT_NAME, Loaded, load
from kvpolicy.evaluation.progress import Progress


def plain_console(*, stderr: bool = False) -> Console:
    """Return a rich console that prints text as it is, without markup, colours or wrapping."""
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Progress]:
    """Show a progress bar on a console, stderr by default; yield the function that updates it."""
    console = console or Console(stderr=True)
    with Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        # Without a terminal, a bar would leave only an empty line.
        disable=not console.is_terminal,
        # Output to another stream must not be drawn into this one.
        redirect_stdout=False,
        redirect_stderr=console.stderr,
    ) as bars:
        task = bars.add_task("starting", total=None)

        def tell(stage: str, done: int, total: int) -> None:
            bars.update(task, description=stage, completed=done, total=total)

        yield tell


@contextmanager
def progress_lines(console: Console) -> Iterator[Progress]:
    """Print a line whenever a stage of work begins; yield the function that reports stages."""
    latest = ""

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal latest
        if stage != latest:
            console.print(f"{stage} ...", style="dim", soft_wrap=True)
            console.file.flush()
        latest = stage

    yield tell


def progress_shown(console: Console) -> AbstractContextManager[Progress]:
    """Show a progress bar on a terminal, or lines of progress in other output."""
    return progress_bar(console) if console.is_terminal else progress_lines(console)


def load_shown(name: str | None, *, dtype: str = "auto", device: str = "cpu") -> Loaded:
    """Load a model, and show on stderr that it is loading, or how far a conversion is.

    Transformers prints nothing; its errors are raised, see `kvpolicy.evaluation.models.load`.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    errors = Console(stderr=True)
    with errors.status(f"loading model {name or DEFAULT_NAME}") as status:

        def tell(stage: str, done: int, total: int) -> None:
            status.update(f"{stage}, step {min(done + 1, total)} of {total}; it is done once")
            if not errors.is_terminal and not done:
                errors.print(f"{stage}; it is done once, in some 20 seconds", soft_wrap=True)

        return load(name, dtype=dtype, device=device, progress=tell)
