"""What `kvpolicy analyze` and `kvpolicy calibrate` share: options, prompts and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvpolicy.evaluation.commands.shared import Option
from kvpolicy.evaluation.extras import require
from kvpolicy.evaluation.results import check_folder, check_threads, default_threads
from kvpolicy.evaluation.text_files import read_text

if TYPE_CHECKING:
    from torch import Tensor

    from kvpolicy.evaluation.models import Loaded

PromptsFile = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help='File with a JSON object {"context", "question", "answer"} on each line; answers are '
        "not read. Default: questions about facts hidden in Python's documentation.",
    ),
]
Context = Annotated[
    int | None, Option(min=1, metavar="N", help="Tokens of a made prompt; default: 1000.")
]
Count = Annotated[
    int | None,
    Option(min=1, metavar="N", help="Number of prompts; default: 8, or the whole --prompts-file."),
]
Seed = Annotated[int, Option(metavar="N", help="Random seed of made prompts.")]
TspRate = Annotated[
    float,
    Option(
        metavar="RATE",
        help="Fraction of the prompt's tokens that later layers read after a drop, in (0, 1].",
    ),
]
Out = Annotated[Path | None, Option(metavar="DIR", help="Folder to write numbers and picture to.")]


def check_before(
    out: Path | None, names: Sequence[str], threads: int | None, *files: Path | None
) -> int:
    """Check options before torch is imported; return the number of threads."""
    if out is not None:
        check_folder(out, names)
        require("matplotlib", extra="plot")
    for file in files:
        if file is not None:
            read_text(file, "prompts file")
    return check_threads(default_threads() if threads is None else threads)


def prompts_of(
    loaded: Loaded, file: Path | None, context: int | None, count: int | None, seed: int
) -> list[Tensor]:
    """Return the token ids ``[1, prompt_len]`` of prompts from a file, or of made ones."""
    import torch

    from kvpolicy.evaluation.tasks.files import Files
    from kvpolicy.evaluation.tasks.needles import Needles

    if file is not None and context is not None:
        raise ValueError("--context must not be given with a file, whose prompts are read whole")
    if file is None:
        asked = Needles().questions(loaded.tokenizer, context or 1000, count or 8, seed)
    else:
        asked = Files(file).questions(loaded.tokenizer, 1 << 40, count or 1 << 40)
    return [torch.tensor([[*each.document_ids, *each.question_ids]]) for each in asked]


def described(prompts: Sequence[Tensor]) -> str:
    """Return how many prompts there are and how long, as text."""
    lengths = sorted({prompt.shape[1] for prompt in prompts})
    span = " to ".join(f"{length:,}" for length in dict.fromkeys((lengths[0], lengths[-1])))
    return f"{len(prompts)} prompt{'s' * (len(prompts) > 1)} of {span} tokens"


def write(
    out: Path, names: Sequence[str], loaded: Loaded, data: Mapping[str, Any], picture: bytes
) -> None:
    """Write the numbers and the picture, both or neither, and say so."""
    from kvpolicy.evaluation.commands.terminal import show_written
    from kvpolicy.evaluation.results import as_json, environment, write_all

    machine = environment(loaded.model.device)
    numbers = as_json({"model": loaded.name, "dtype": loaded.dtype, **data, **machine})
    write_all(out, dict(zip(names, (numbers, picture), strict=True)))
    show_written(out, names)
