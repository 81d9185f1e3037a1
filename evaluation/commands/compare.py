"""Run `kvpolicy compare`: policies side by side on questions about real text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from kvpolicy.evaluation.commands import shared
from kvpolicy.evaluation.commands.shared import option, with_policies
from kvpolicy.evaluation.defaults import RATES
from kvpolicy.evaluation.policy_options import PolicyOptions

if TYPE_CHECKING:
    from rich.console import Console

    from kvpolicy.evaluation.comparison.study import Comparison
    from kvpolicy.evaluation.models import Loaded

# With full context, the twelve rows that are shown by default: the methods that people know.
SHOWN = (
    "replaykv",
    "criticalkv",
    "adakv",
    "snapkv",
    "fastkv",
    "gemfilter",
    "keydiff",
    "expected_attention",
    "h2o",
    "streamingllm",
    "random",
)
FILES = ("compare.json", "compare.png")


@with_policies
def compare(
    *,
    model: shared.ModelName = None,
    task: Annotated[
        list[str] | None,
        option("NAME", f"What is asked: {shared.TASKS}; repeatable; default: needles."),
    ] = None,
    context: shared.Context = 1500,
    count: shared.Count = 16,
    later: Annotated[
        bool, option(None, "Policies read the document before they know the question.", "--later")
    ] = False,
    all_policies: Annotated[bool, option(None, "All policies, not only eleven.", "--all")] = False,
    tsp_layers: Annotated[
        str | None,
        option("LAYERS", "Layers such as 7,14,21: policies that drop tokens get a row for each."),
    ] = None,
    seed: shared.Seed = 0,
    rounds: Annotated[
        int, option("N", "Prompts that are timed; fewer than 5 tell no time.", min=0)
    ] = 5,
    answer_tokens: Annotated[int, option("N", "Tokens decoded for each of them.", min=1)] = 16,
    threads: shared.Threads = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "cpu",
    out: shared.Out = None,
    policies: PolicyOptions,
) -> None:
    """Compare policies with full context: right answers, probability, memory and time.

    By default eleven policies and full context, each keeping 10% and 20% of prompts of 1,500
    tokens of real text. --all compares every policy.
    """
    tasks = tuple(dict.fromkeys(task or ("needles",)))
    threads = shared.check_before(out, FILES, threads, *tasks)
    rule = "--tsp-layers must be numbers separated by commas"
    layers = () if tsp_layers is None else shared.numbers(tsp_layers, 0, rule)

    import attrs
    import torch

    from kvpolicy.evaluation.chosen import chosen_variants
    from kvpolicy.evaluation.commands.terminal import load_shown, plain_console, progress_shown
    from kvpolicy.evaluation.comparison.picture import plot_comparison
    from kvpolicy.evaluation.comparison.study import compare as run_comparison
    from kvpolicy.evaluation.tasks.naming import task_named

    if not (policies.names or policies.parts or all_policies):
        policies = attrs.evolve(policies, names=SHOWN)
    chosen = chosen_variants(policies, policies.rates or RATES)
    if layers:
        chosen = [each for one in chosen for each in one.at_layers(layers)]
    torch.set_num_threads(threads)
    loaded = load_shown(model, dtype=dtype, device=device)
    for variant in chosen:
        variant.check_model(loaded.model.config.num_hidden_layers)
    questions = [
        each
        for name in tasks
        for each in task_named(name).questions(loaded.tokenizer, context, count, seed)
    ]
    console = plain_console()
    said = f"{len(questions)} prompts of {', '.join(tasks)}, up to {context:,} tokens"
    _headline(console, loaded, threads, said + (", the question asked later" if later else ""))
    settings = {
        "model": loaded.name,
        "dtype": loaded.dtype,
        "tasks": list(tasks),
        "context": context,
        "count": count,
        "later": later,
        "seed": seed,
        "rounds": rounds,
        "answer_tokens": answer_tokens,
    }

    def show(found: Comparison) -> None:
        _show(found)
        if out is not None:
            data = {"settings": settings, **found.as_data()}
            shared.write(out, FILES, loaded, data, plot_comparison(found))

    with progress_shown(console) as progress:
        found = run_comparison(
            loaded.model,
            loaded.tokenizer,
            questions,
            chosen,
            later=later,
            rounds=rounds,
            new_tokens=answer_tokens,
            progress=progress,
            unfinished=show,
        )
    show(found)


def _headline(console: Console, loaded: Loaded, threads: int, said: str) -> None:
    from kvpolicy.evaluation.results import environment

    found = environment(loaded.model.device)
    versions, machine = found["versions"], found["machine"]
    console.print(
        f"kvpolicy {versions['kvpolicy']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}\nmodel {loaded.name} in {loaded.dtype} on "
        f"{machine.get('gpu', machine['device'])}, {threads} thread{'s' * (threads > 1)}, "
        f"{machine['processor']}\n{said}",
        style="dim",
    )


def _show(found: Comparison) -> None:
    from rich.console import Console

    from kvpolicy.evaluation.commands.terminal import plain_console
    from kvpolicy.evaluation.comparison.table import comparison_table, legend, sentences

    console = Console(highlight=False, markup=False)
    console.print()
    console.print(comparison_table(found))
    console.print()
    for line in legend(found):
        console.print(line, style="dim")
    for line in sentences(found):
        console.print(line)
    if not found.finished:
        plain_console().print(f"stopped after {found.questions} questions, before the timing")
