"""What `kvpolicy analyze`, `calibrate` and `compare` share: options, prompts and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvpolicy.evaluation.commands.shared import Option
from kvpolicy.evaluation.extras import require
from kvpolicy.evaluation.results import check_folder, check_threads, default_threads
from kvpolicy.evaluation.tasks.naming import NAMES, check_task, task_named

if TYPE_CHECKING:
    from torch import Tensor

    from kvpolicy.evaluation.models import Loaded

TASKS = f"""{", ".join(NAMES)}, or a file of lines \
{{"context": "...", "question": "...", "answer": "..."}}"""
Task = Annotated[str, Option(metavar="NAME", help=f"Prompts: {TASKS}; answers are not read.")]
Context = Annotated[int, Option(min=1, metavar="N", help="Tokens of a prompt, at most.")]
Count = Annotated[int, Option(min=1, metavar="N", help="Prompts of a task; of a file the first.")]
Seed = Annotated[int, Option(metavar="N", help="Of the prompts.")]
TspRate = Annotated[
    float,
    Option(
        metavar="RATE",
        help="Fraction of the prompt's tokens that later layers read after a drop, in (0, 1].",
    ),
]
Out = Annotated[Path | None, Option(metavar="DIR", help="Folder to write numbers and picture to.")]


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
