"""Run `kvpolicy serve-check`: which exported documents a model can serve, and what they take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.evaluation.commands.shared import Option
from kvpolicy.evaluation.commands.sizes import parse_size
from kvpolicy.evaluation.defaults import DTYPE_NAMES

if TYPE_CHECKING:
    from kvpolicy.integrations.vllm import ServedDocument
    from kvpolicy.integrations.vllm.served_model import ServedModel


def serve_check(
    *,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the exported documents.")
    ],
    model: Annotated[str, Option(metavar="NAME", help="The model: a folder or a Hub name.")],
    dtype: Annotated[
        str,
        Option(
            metavar="NAME", help="Number format of the served model; auto: the checkpoint's own."
        ),
    ] = "auto",
    memory: Annotated[
        str,
        Option(metavar="SIZE", help="Memory for vLLM's blocks, without the weights: 40GB, 24GiB."),
    ] = "16GiB",
    answer: Annotated[
        int, Option(min=1, metavar="N", help="Number of tokens in a question and its answer.")
    ] = 1024,
    block: Annotated[
        int, Option(min=1, metavar="N", help="Number of tokens in a block of vLLM.")
    ] = 16,
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
        own, full = (
            _session_bytes(document, length + answer, block)
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


def _model(model: str, dtype: str) -> ServedModel:
    from transformers import AutoConfig

    from kvpolicy.evaluation.model_names import check_model_name
    from kvpolicy.integrations.vllm.served_model import ServedModel

    name = check_model_name(model)
    config: Any = AutoConfig.from_pretrained(name)
    if dtype == "auto":
        own = config.get_text_config().dtype
        dtype = "float32" if own is None else str(own).removeprefix("torch.")
    elif dtype not in DTYPE_NAMES:
        raise ValueError(f"--dtype must be auto or one of {', '.join(DTYPE_NAMES)}, got {dtype}")
    return ServedModel.named(name, config, dtype)


def _session_bytes(document: ServedDocument, length: int, block: int) -> int:
    """Return the bytes of the blocks that a session takes for a number of entries."""
    return -(-length // block) * block * document.token_bytes
