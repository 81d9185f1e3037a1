"""Define the settings of an evaluation on tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.options import THREADS, ModelOptions, Option, split_names


def _lengths(texts: Sequence[str], option: str) -> tuple[int, ...]:
    found = []
    for text in split_names(texts, option):
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{option} must be numbers of tokens, such as 4096,8192, got {text}")
        found.append(int(text))
    return tuple(found)


@attrs.frozen
class Settings(ModelOptions):
    """Settings of an evaluation on tasks: the model, tasks, policies and how they are asked."""

    tasks: Annotated[
        tuple[str, ...],
        Option(
            "Tasks, groups or tags of lm-evaluation-harness; comma-separated or repeated.",
            ("--tasks", "-t"),
            metavar="NAMES",
            read=split_names,
        ),
    ] = attrs.field(kw_only=True)
    lengths: Annotated[
        tuple[int, ...],
        Option(
            "Prompt lengths in tokens, for tasks that are made for a length; comma-separated or "
            "repeated; default: 4096.",
            read=_lengths,
        ),
    ] = (4096,)
    questions: Annotated[
        tuple[str, ...],
        Option(
            "with: the policy sees the question; later: the question is asked after the policy "
            "has chosen; or both. Default: with.",
            ("--question",),
            metavar="HOW",
            read=split_names,
        ),
    ] = ("with",)
    data: Annotated[Path | None, Option("Folder with local data of the tasks.", metavar="DIR")] = (
        None
    )
    include: Annotated[
        tuple[Path, ...],
        Option("Folder with tasks of your own; repeatable.", metavar="DIR"),
    ] = ()
    limit: Annotated[int | None, Option("Number of documents for each task and length.", min=1)] = (
        None
    )
    batch_size: Annotated[int, Option("Number of prompts to read at once.", min=1)] = 1
    chat_template: Annotated[
        bool,
        Option(
            "Use the tokenizer's chat template.",
            ("--chat/--no-chat",),
        ),
    ] = False
    # None for the folder's number, or in a new folder the number of idle processors.
    threads: Annotated[int | None, THREADS] = None
