"""What `kvpolicy analyze` and `kvpolicy calibrate` share: options, checks and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    out: Path | None,
    files: Sequence[str],
    threads: int | None,
    prompts: Path | None,
    context: int | None,
) -> int:
    """Check options before torch is imported; return the number of threads."""
    if out is not None:
        check_folder(out, files)
        require("matplotlib", extra="plot")
    if prompts is not None:
        read_text(prompts, "prompts file")
        if context is not None:
            raise ValueError(
                "--context must not be given with a file, whose prompts are read whole"
            )
    return check_threads(default_threads() if threads is None else threads)


def prompts_of(
    loaded: Loaded, file: Path | None, context: int | None, count: int | None, seed: int
) -> list[Tensor]:
    """Return the token ids ``[prompt_len]`` of prompts from a file, or of made ones."""
    import torch

    from kvpolicy.evaluation.tasks.files import Files
    from kvpolicy.evaluation.tasks.needles import Needles

    if file is None:
        asked = Needles().questions(loaded.tokenizer, context or 1000, count or 8, seed)
    else:
        asked = Files(file).questions(loaded.tokenizer, 1 << 40, count or 1 << 40)
    return [torch.tensor([*each.document_ids, *each.question_ids]) for each in asked]


def tokens_of(lengths: Sequence[int]) -> str:
    """Return how many prompts there are and how long, as text.

    Example:
        >>> tokens_of([990]), tokens_of([990, 1000])
        ('1 prompt of 990 tokens', '2 prompts of 990 to 1,000 tokens')
    """
    low, high = min(lengths), max(lengths)
    span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"{len(lengths)} prompt{'s' * (len(lengths) > 1)} of {span} tokens"
