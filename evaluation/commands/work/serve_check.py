"""Do the work of `kvpolicy serve-check`."""

from __future__ import annotations

from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from kvpolicy.evaluation.commands.serve_check import ServeCheckOptions
from kvpolicy.evaluation.commands.terminal import plain_console
from kvpolicy.evaluation.defaults import DTYPE_NAMES
from kvpolicy.evaluation.model_names import check_model_name
from kvpolicy.integrations.vllm import DocumentError, ServedDocument
from kvpolicy.integrations.vllm.folder import DocumentFolder
from kvpolicy.integrations.vllm.served_model import ServedModel


def run_serve_check(options: ServeCheckOptions) -> None:
    """Do what `kvpolicy serve-check` does."""
    folder, model = DocumentFolder(options.folder), _model(options)
    names = folder.names()
    if not names:
        plain_console().print(f"{options.folder} has no documents")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("document", "read", "held", "MiB a session", "sessions", "with full context"):
        table.add_column(header, justify="left" if header == "document" else "right")
    refused = []
    for name in names:
        try:
            document = folder.get(name)
            model.check(document)
        except DocumentError as error:
            refused.append(str(error))
            continue
        table.add_row(name, *_numbers(document, options))
    if len(refused) < len(names):
        Console(highlight=False, markup=False).print(table)
        plain_console().print(
            f"A session: the document and {options.answer:,} tokens of question and answer, in "
            f"whole blocks of {options.block} tokens.\nSessions on one document share its full "
            "blocks; the number counted is of sessions with a document each, in "
            f"{options.memory / 2**30:.1f} GiB."
        )
    for reason in refused:
        plain_console().print(f"not served: {reason}")
    if refused:
        raise typer.Exit(1)


def _model(options: ServeCheckOptions) -> ServedModel:
    name = check_model_name(options.model)
    config: Any = AutoConfig.from_pretrained(name)
    dtype = options.dtype
    if dtype == "auto":
        own = config.get_text_config().dtype
        dtype = "float32" if own is None else str(own).removeprefix("torch.")
    elif dtype not in DTYPE_NAMES:
        raise ValueError(f"--dtype must be auto or one of {', '.join(DTYPE_NAMES)}, got {dtype}")
    return ServedModel.named(name, config, dtype)


def _numbers(document: ServedDocument, options: ServeCheckOptions) -> tuple[str, ...]:
    own, full = (
        _session_bytes(document, length, options) for length in (document.length, document.read_len)
    )
    return (
        f"{document.read_len:,}",
        f"{document.length:,}",
        f"{own / 2**20:,.1f}",
        f"{options.memory // own:,}",
        f"{options.memory // full:,}",
    )


def _session_bytes(document: ServedDocument, length: int, options: ServeCheckOptions) -> int:
    """Return the bytes of the blocks that a session takes for a number of entries."""
    blocks = -(-(length + options.answer) // options.block)
    return blocks * options.block * document.token_bytes
