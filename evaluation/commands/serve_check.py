"""Run `kvpolicy serve-check`: which exported documents a model can serve, and what they take."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.evaluation.commands.shared import option
from kvpolicy.evaluation.defaults import DTYPE_NAMES

if TYPE_CHECKING:
    from kvpolicy.integrations.vllm.served_model import ServedModel

UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{prefix}{binary}B": (1024 if binary else 1000) ** (power + 1)
    for power, prefix in enumerate("kMGT")
    for binary in ("", "i")
}
_BY_LOWER = {unit.lower(): size for unit, size in UNITS.items()}
_SIZE = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*")


def serve_check(
    *,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the exported documents.")
    ],
    model: Annotated[str, option("NAME", "The model: a folder or a Hub name.")],
    dtype: Annotated[
        str, option("NAME", "Number format of the served model; auto: the checkpoint's own.")
    ] = "auto",
    memory: Annotated[
        str, option("SIZE", "Memory for vLLM's blocks, without the weights: 40GB, 24GiB.")
    ] = "16GiB",
    answer: Annotated[
        int, option("N", "Number of tokens in a question and its answer.", min=1)
    ] = 1024,
    block: Annotated[int, option("N", "Number of tokens in a block of vLLM.", min=1)] = 16,
) -> None:
    """Show which documents fit a model, the memory of a session, and how many sessions fit."""
    size = parse_size(memory, "--memory")

    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kvpolicy.evaluation.commands.terminal import plain_console
    from kvpolicy.integrations.vllm import DocumentError
    from kvpolicy.integrations.vllm.folder import DocumentFolder

    documents, served = DocumentFolder(folder), _model(model, dtype)
    names = documents.names()
    if not names:
        plain_console().print(f"{folder} has no documents")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("document", "read", "held", "MiB a session", "sessions", "with full context"):
        table.add_column(header, justify="left" if header == "document" else "right")
    refused = []
    for name in names:
        try:
            document = documents.get(name)
            served.check(document)
        except DocumentError as error:
            refused.append(str(error))
            continue
        own, full = (  # in whole blocks
            -(-(length + answer) // block) * block * document.token_bytes
            for length in (document.length, document.read_len)
        )
        table.add_row(
            name,
            f"{document.read_len:,}",
            f"{document.length:,}",
            f"{own / 2**20:,.1f}",
            f"{size // own:,}",
            f"{size // full:,}",
        )
    if len(refused) < len(names):
        Console(highlight=False, markup=False).print(table)
        plain_console().print(
            f"A session: the document and {answer:,} tokens of question and answer, in "
            f"whole blocks of {block} tokens.\nSessions on one document share its full "
            "blocks; the number counted is of sessions with a document each, in "
            f"{size / 2**30:.1f} GiB."
        )
    for reason in refused:
        plain_console().print(f"not served: {reason}")
    if refused:
        raise typer.Exit(1)


def parse_size(text: str, option: str) -> int:
    """Parse bytes such as ``80GB`` (powers of 1,000), ``24GiB`` (1,024) or ``40e9``."""
    found = _SIZE.fullmatch(text)
    unit = _BY_LOWER.get(found[2].lower()) if found else None
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:  # such as a number with two points
        number = math.nan
    if found is None or unit is None or not math.isfinite(number) or number * unit < 1:
        raise ValueError(
            f"{option} must be a number of bytes such as 80GB, 24GiB or 40e9, in "
            f"{', '.join(name for name in UNITS if name)}, got {text!r}"
        )
    return round(number * unit)


def _model(model: str, dtype: str) -> ServedModel:
    from transformers import AutoConfig

    from kvpolicy.evaluation.model_names import check_model_name
    from kvpolicy.integrations.vllm.served_model import ServedModel

    name = check_model_name(model)
    config: Any = AutoConfig.from_pretrained(name)
    if dtype == "auto":
        dtype = config.get_text_config().dtype or "float32"
    elif dtype not in DTYPE_NAMES:
        raise ValueError(f"--dtype must be auto or one of {', '.join(DTYPE_NAMES)}, got {dtype}")
    return ServedModel.named(name, config, dtype)
