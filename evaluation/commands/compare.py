"""`kvpolicy compare`: policies side by side on prompts with known answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvpolicy.evaluation.commands.chosen import chosen_variants
from kvpolicy.evaluation.commands.options import (
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
    DeviceOption,
    DtypeOption,
    load_shown,
    progress_bar,
)
from kvpolicy.evaluation.comparison.study import Settings, Study, check, run, write
from kvpolicy.evaluation.comparison.tables import (
    comparison_legend,
    comparison_table,
    held_out_legend,
    held_out_table,
    rate_sweep_legend,
    rate_sweep_table,
    sweep_legend,
    sweep_table,
)
from kvpolicy.evaluation.comparison.variant import RATES
from kvpolicy.evaluation.models import NEEDLE
from kvpolicy.evaluation.results import cpu_count
from kvpolicy.evaluation.tasks.prompts import MIN_NEEDLE_CONTEXT


def compare(
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="A folder, a Hub name, or needle for the bundled model."),
    ] = NEEDLE,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Lines of {"prompt": "...", "answer": "..."}; default: needle task.',
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
    context: Annotated[
        int,
        typer.Option(
            min=MIN_NEEDLE_CONTEXT, metavar="N", help="Tokens of a needle prompt, at least 64."
        ),
    ] = 1024,
    count: Annotated[
        int, typer.Option(min=2, metavar="N", help="Needle prompts: half one-hop, half two-hop.")
    ] = 200,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the needle prompts.")] = 0,
    tsp_layer: TSPLayerOption = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also FastKV's accuracy by TSP layer, other prompts.")
    ] = False,
    sweep_rates: Annotated[
        bool, typer.Option("--sweep-rates", help="Also by TSP rate and retention rate.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds of timing.")] = 9,
    new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens decoded in a round.")
    ] = 32,
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="CPU threads; default: all processors, at most 4."),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for compare.json and the pictures.")
    ] = None,
) -> None:
    """Hold policies against full context: accuracy, memory and speed.

    Without --policy all policies, at rates 0.02, 0.1 and 0.2.
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
    settings = Settings(
        model=model,
        prompts=prompts,
        policies=options.names,
        rates=options.rates or RATES,
        context=context,
        count=count,
        seed=seed,
        tsp_layer=tsp_layer,
        sweep=sweep,
        sweep_rates=sweep_rates,
        rounds=rounds,
        new_tokens=new_tokens,
        threads=threads or min(cpu_count(), 4),
        dtype=dtype,
        device=device,
    )
    variants = chosen_variants(options, RATES, tsp_layer=settings.effective_tsp_layer)
    chosen = check(settings, out, variants)
    loaded = load_shown(model, dtype, device)
    with progress_bar() as progress:
        study = run(settings, chosen, loaded, progress)
    show(study)
    if out is not None:
        names = write(study, out)
        Console(highlight=False, markup=False, soft_wrap=True).print(
            f"\nwritten to {out}: {', '.join(names)}"
        )


def show(study: Study) -> None:
    """Print a study: what it was measured with, the tables, their legends, the notes."""
    console = Console(highlight=False, markup=False)
    console.print(study.headline(), style="dim")
    _show_table(console, comparison_table(study.comparison), comparison_legend(study.comparison))
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
