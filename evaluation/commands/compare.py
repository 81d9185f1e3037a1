"""Run `kvpolicy compare`: policies side by side on prompts with known answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

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
)
from kvpolicy.evaluation.commands.terminal import (
    BeyondPositionsOption,
    DeviceOption,
    DtypeOption,
    ThreadsOption,
    load_shown,
    progress_shown,
)
from kvpolicy.evaluation.comparison.latency import Timing
from kvpolicy.evaluation.comparison.layout import Layout, comparison_legend
from kvpolicy.evaluation.comparison.rows import ACCURACY_STAGE, Listener, Row
from kvpolicy.evaluation.comparison.study import (
    QUICK,
    THOROUGH,
    Settings,
    Study,
    check,
    check_loaded,
    headline,
    run,
    write,
)
from kvpolicy.evaluation.comparison.tables import (
    held_out_legend,
    held_out_table,
    rate_sweep_legend,
    rate_sweep_table,
    sweep_legend,
    sweep_table,
)
from kvpolicy.evaluation.comparison.variant import Variant
from kvpolicy.evaluation.models import NEEDLE
from kvpolicy.evaluation.results import default_threads
from kvpolicy.evaluation.tasks.own_prompts import OWN_PROMPTS
from kvpolicy.evaluation.tasks.prompts import MIN_NEEDLE_CONTEXT


def compare(
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
            help='Lines of {"prompt": "...", "answer": "..."}; default: made for needle and '
            "long_answers.",
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
    context: Annotated[
        int | None,
        typer.Option(
            min=MIN_NEEDLE_CONTEXT,
            metavar="N",
            help="Tokens of a prompt that is made, at least 64; default: "
            + ", ".join(f"{name} {own.context}" for name, own in OWN_PROMPTS.items())
            + ".",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Prompts that are made, half of each kind; default: "
            f"{QUICK.count}, thorough {THOROUGH.count}.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the prompts that are made.")] = 0,
    tsp_layer: TSPLayerOption = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also FastKV's accuracy by TSP layer, other prompts.")
    ] = False,
    sweep_rates: Annotated[
        bool, typer.Option("--sweep-rates", help="Also by TSP rate and retention rate.")
    ] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="More rates and prompts: many minutes, not two.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Rounds of timing; fewer than 5 tell no speed; default: "
            f"{QUICK.rounds}, fewer after {QUICK.timing_seconds:g} s, thorough {THOROUGH.rounds}.",
        ),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens decoded in a round.")
    ] = 16,
    threads: ThreadsOption = None,
    beyond_positions: BeyondPositionsOption = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for compare.json and the pictures.")
    ] = None,
) -> None:
    """Hold policies against full context: accuracy, memory and speed.

    Without --policy all policies, without --rate at 0.1; --thorough at 0.02, 0.1 and 0.2.
    """
    extent = THOROUGH if thorough else QUICK
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
        prompts=prompts,
        policies=options.names,
        rates=options.rates or extent.rates,
        context=context or OWN_PROMPTS.get(model, OWN_PROMPTS[NEEDLE]).context,
        count=count or extent.count,
        seed=seed,
        tsp_layer=tsp_layer,
        sweep=sweep,
        sweep_rates=sweep_rates,
        rounds=rounds or extent.rounds,
        timing_seconds=extent.timing_seconds if rounds is None else None,
        new_tokens=new_tokens,
        threads=threads or default_threads(),
        dtype=dtype,
        device=device,
        beyond_positions=beyond_positions,
    )
    asked = chosen_variants(options, extent.rates, tsp_layer=settings.effective_tsp_layer)
    chosen = check(settings, out, asked)
    loaded = load_shown(model, dtype, device)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    # Before anything is printed; `run` does it again.
    check_loaded(settings, chosen, loaded)
    for line in headline(settings, loaded):
        console.print(line, style="dim")
    for rule in dict.fromkeys(each.parameters.get("decoding") for each in chosen):
        if rule is not None:
            console.print(f"answers: {rule}", style="dim")
    unbounded = dict.fromkeys(each.name for each in chosen if each.policy.decoding is None)
    if decoding_tokens is not None and unbounded:
        console.print(
            f"answers held whole, for want of a rule: {', '.join(unbounded)}", style="dim"
        )
    stopped: list[Study] = []
    try:
        with progress_shown(console, quiet=ACCURACY_STAGE) as progress:
            study = run(settings, chosen, loaded, progress, Rows(console), stopped.append)
    except BaseException:
        for study in stopped:
            show_and_write(study, out)
        raise
    show_and_write(study, out)


class Rows(Listener):
    """A listener that prints a comparison's table, each row when it is done.

    Args:
        console: The console to print to; it must not wrap lines.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.layout: Layout | None = None

    def timed(
        self, variants: Sequence[Variant], timings: Sequence[Timing], kinds: Sequence[str]
    ) -> None:
        """Print the header."""
        self.layout = Layout.of(variants, timings, kinds)
        self._print(["", *self.layout.header], "bold")

    def row(self, row: Row) -> None:
        """Print a row."""
        assert self.layout is not None
        self._print(self.layout.row(row))

    def _print(self, lines: Sequence[str], style: str | None = None) -> None:
        for line in lines:
            self.console.print(line, style=style)
        # Into a file, too, at once: who waits for the rest can read it.
        self.console.file.flush()


def show_and_write(study: Study, out: Path | None) -> None:
    """Print a study without its rows, and write it if there is a folder."""
    show(study)
    if out is not None:
        console = Console(highlight=False, markup=False, soft_wrap=True)
        console.print(f"\nwritten to {out}: {', '.join(write(study, out))}")


def show(study: Study) -> None:
    """Print a study without its rows: legends, notes and the tables of the sweeps."""
    console = Console(highlight=False, markup=False)
    console.print()
    for line in comparison_legend(study.comparison):
        console.print(line, style="dim")
    for note in study.notes:
        console.print(note)
    if study.sweep is not None:
        _show_table(console, sweep_table(study.sweep), sweep_legend(study.sweep))
    if study.sweep is not None and study.sweep.calibration is not None:
        _show_table(console, held_out_table(study.sweep), held_out_legend(study.sweep))
    if study.rate_sweep is not None:
        table, legend = rate_sweep_table(study.rate_sweep), rate_sweep_legend(study.rate_sweep)
        _show_table(console, table, legend)


def _show_table(console: Console, table: Table, legend: list[str]) -> None:
    console.print()
    console.print(table)
    console.print()
    for line in legend:
        console.print(line, style="dim")
