"""Run `kvpolicy eval`: policies on the tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

import attrs
import typer
from rich.console import Console

from kvpolicy.evaluation.commands.chosen import chosen_variants
from kvpolicy.evaluation.commands.options import (
    DecodingEveryOption,
    DecodingTokensOption,
    PolicyOption,
    PropagationOption,
    ProtectOption,
    RateOption,
    RetentionTokensOption,
    ScorerOption,
    SelectorOption,
    SetOption,
    TSPLayerOption,
    policy_options,
    split_names,
)
from kvpolicy.evaluation.commands.terminal import (
    BeyondPositionsOption,
    DeviceOption,
    DtypeOption,
    ThreadsOption,
    load_quietly,
    progress_shown,
)
from kvpolicy.evaluation.models import NEEDLE, default_tsp_layer
from kvpolicy.evaluation.suite.report.words import duration
from kvpolicy.evaluation.suite.runner import Listener
from kvpolicy.evaluation.suite.sample import Answer, Cell
from kvpolicy.evaluation.suite.study import Settings, check, run

DEFAULT = "fastkv"
RATES = (0.1,)


def eval(
    tasks: Annotated[
        list[str],
        typer.Option(
            "--tasks",
            "-t",
            metavar="NAMES",
            help="The harness's tasks, groups or tags, comma-separated or repeated.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of results; one that was begun goes on.")
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="A folder, a Hub name, or a bundled model: needle, ruler_words, long_answers.",
        ),
    ] = NEEDLE,
    lengths: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N",
            help="Prompt lengths of tasks that are made for one, as the tasks; default: 4096.",
        ),
    ] = None,
    policy: PolicyOption = None,
    rate: RateOption = None,
    retention_tokens: RetentionTokensOption = None,
    protect: ProtectOption = None,
    parameters: SetOption = None,
    scorer: ScorerOption = None,
    selector: SelectorOption = None,
    propagation: PropagationOption = None,
    decoding_tokens: DecodingTokensOption = None,
    decoding_every: DecodingEveryOption = None,
    tsp_layer: TSPLayerOption = None,
    question: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOW",
            help="with: the policy sees the question; later: it is asked when the policy has "
            "chosen; or both. Default: with.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Local data of the tasks.")
    ] = None,
    include: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="A folder with tasks of your own, repeatable."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Documents of each task and length.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompts that are read at once.")
    ] = 1,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Ask in the tokenizer's chat template.")
    ] = False,
    beyond_positions: BeyondPositionsOption = False,
    threads: ThreadsOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
) -> None:
    """Ask every combination of task, length, policy, rate and question, and full context.

    Every sample is a line of samples.jsonl as soon as it is answered; the same command goes on
    after a kill. kvpolicy report makes a page of the folder. Without --policy FastKV.
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
        decoding_tokens=decoding_tokens,
        decoding_every=decoding_every,
    )
    settings = Settings(
        model=model,
        tasks=unique(tasks, "--tasks"),
        lengths=_lengths(lengths or ["4096"]),
        questions=unique(question or ["with"], "--question"),
        limit=limit,
        batch_size=batch_size,
        chat_template=chat_template,
        data=data,
        include=tuple(include or ()),
        threads=threads,
        dtype=dtype,
        device=device,
        beyond_positions=beyond_positions,
    )
    check(settings, out)
    if not options.names and not options.parts:
        options = attrs.evolve(options, names=(DEFAULT,))
    layer = default_tsp_layer(model) if tsp_layer is None else tsp_layer
    chosen = chosen_variants(options, RATES, tsp_layer=layer)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        with progress_shown(console, quiet="done") as progress:
            run(
                settings,
                out,
                chosen=chosen,
                loader=load_quietly,
                progress=progress,
                listener=Rows(console),
            )
    except KeyboardInterrupt:
        console.print(f"what is answered stays in {out}; the same command goes on", style="dim")
        raise
    console.print(f"written to {out}; for a page of it: kvpolicy report {out}")


class Rows(Listener):
    """A listener that prints a line for each finished cell.

    Args:
        console: The console to print to; it must not wrap lines.
    """

    def __init__(self, console: Console) -> None:
        self.console = console

    def finished(self, cell: Cell, answers: Sequence[Answer], found: int) -> None:
        """Print a cell's score."""
        metric = next(iter(answers[0].scores))
        score = fmean(each.scores[metric] for each in answers)
        seconds = duration(fmean(each.total_seconds for each in answers))
        samples = f"{len(answers)} sample{'s' * (len(answers) > 1)}, {seconds} each"
        there = f", {found} of them there before" if found else ""
        self.console.print(f"{cell}: {metric} {score:.3f} of {samples}{there}")
        self.console.file.flush()  # into a file, too, at once


def unique(names: Sequence[str], option: str) -> tuple[str, ...]:
    """Split names that may be repeated, comma-separated or both; return each once."""
    return tuple(dict.fromkeys(split_names(names, option)))


def _lengths(texts: Sequence[str]) -> tuple[int, ...]:
    found = []
    for text in unique(texts, "--lengths"):
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"--lengths must be numbers of tokens, such as 4096,8192, got {text}")
        found.append(int(text))
    return tuple(found)
