"""Run `kvpolicy eval`: policies on tasks of lm-evaluation-harness, into a folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvpolicy.evaluation.commands import shared
from kvpolicy.evaluation.commands.shared import option, with_policies
from kvpolicy.evaluation.defaults import FULL_CONTEXT
from kvpolicy.evaluation.policy_options import PolicyOptions, split_names

if TYPE_CHECKING:
    from rich.console import Console


@with_policies
def eval(
    *,
    tasks: Annotated[
        list[str],
        option("NAMES", "Tasks, groups or tags of lm-evaluation-harness.", "--tasks", "-t"),
    ],
    lengths: Annotated[
        str, option("N,N", "Prompt lengths, for tasks made for one, as in RULER.")
    ] = "4096",
    limit: Annotated[int | None, option("N", "Documents of each task and length.", min=1)] = None,
    later: Annotated[
        bool, option(None, "Policies choose before they know the question.", "--later")
    ] = False,
    include: Annotated[
        list[Path] | None, option("DIR", "Folder of your own tasks; repeatable.")
    ] = None,
    chat: Annotated[
        bool, option(None, "Each prompt is the user's turn of a chat.", "--chat/--no-chat")
    ] = False,
    batch_size: Annotated[int, option("N", "Prompts read at once.", min=1)] = 1,
    model: shared.ModelName = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "cpu",
    beyond_positions: shared.BeyondPositions = False,
    threads: shared.Threads = None,
    out: Annotated[Path, option("DIR", "Folder of the results, new or to be continued.")],
    policies: PolicyOptions,
) -> None:
    """Score policies on tasks, at several prompt lengths, against full context.

    What is answered is kept. Run the same command again to continue after an interruption, or
    another one to add policies, tasks, lengths or documents. Default policy: FastKV, keeping 10%.
    """
    names = split_names(tasks, "--tasks")
    rule = "--lengths must be numbers of tokens, such as 4096,8192"
    wanted = shared.numbers(lengths, 1, rule)
    for folder in include or ():
        if not folder.is_dir():
            raise ValueError(f"--include must be a folder, got {folder}")

    import attrs
    import torch

    from kvpolicy.evaluation.chosen import chosen_variants, variants
    from kvpolicy.evaluation.commands.terminal import load_shown, plain_console, progress_shown
    from kvpolicy.evaluation.extras import require
    from kvpolicy.evaluation.results import check_threads, default_threads

    require("lm_eval", extra="eval")
    require("matplotlib", extra="plot")

    from kvpolicy.evaluation.suite.answering import answering_model, check_prompts, fill
    from kvpolicy.evaluation.suite.folder import check_same, read_settings, settings_of
    from kvpolicy.evaluation.suite.tasks import How, find_tasks, make_prompts

    if not (policies.names or policies.parts):
        policies = attrs.evolve(policies, names=("fastkv",))
    found = [*variants([FULL_CONTEXT], ()), *chosen_variants(policies, (0.1,))]
    chosen = [*{each.label: each for each in found}.values()]
    threads = threads or (read_settings(out) or {}).get("threads")
    folders = find_tasks(names, include or ())
    torch.set_num_threads(default_threads() if threads is None else check_threads(threads))
    loaded = load_shown(model, dtype=dtype, device=device)
    if chat and not getattr(loaded.tokenizer, "chat_template", None):
        raise ValueError(f"--chat needs a model with a chat template, got {loaded.name}")
    how = How(wanted, limit, later, chat, batch_size, beyond_positions)
    settings = settings_of(loaded, chat=chat, batch_size=batch_size)
    check_same(out, settings)
    console = plain_console()
    with progress_shown(console) as progress:
        progress("making prompts", 0, 1)
        lm = answering_model(loaded, None, how)
        prompts = make_prompts(folders, how, lm)
        check_prompts(loaded, prompts, chosen, how, lm)
        try:
            for line in fill(out, settings, loaded, prompts, chosen, how, progress):
                console.print(line)
                console.file.flush()
        except KeyboardInterrupt:
            console.print(f"stopped; the same command continues with {out}")
            raise
        finally:
            _show(out, console)


def _show(folder: Path, console: Console) -> None:
    """Print the table of all that a folder holds, and write it and the picture beside it."""
    from kvpolicy.evaluation.results import write_all
    from kvpolicy.evaluation.suite.folder import FILES, load_cells
    from kvpolicy.evaluation.suite.table import csv_text, lines_of, markdown, plot_rows, rows_of

    rows = rows_of(load_cells(folder))
    if rows:
        console.print("\n".join(["", *lines_of(rows)]))
        contents = (markdown(rows).encode(), csv_text(rows).encode(), plot_rows(rows))
        write_all(folder, dict(zip(FILES, contents, strict=True)))
        console.print(f"written to {folder}: {', '.join(FILES)}")
