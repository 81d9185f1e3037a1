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
            "The harness's tasks, groups or tags, comma-separated or repeated.",
            ("--tasks", "-t"),
            metavar="NAMES",
            read=split_names,
        ),
    ] = attrs.field(kw_only=True)
    lengths: Annotated[
        tuple[int, ...],
        Option(
            "Prompt lengths of tasks that are made for one, as the tasks; default: 4096.",
            read=_lengths,
        ),
    ] = (4096,)
    questions: Annotated[
        tuple[str, ...],
        Option(
            "with: the policy sees the question; later: it is asked when the policy has chosen; "
            "or both. Default: with.",
            ("--question",),
            metavar="HOW",
            read=split_names,
        ),
    ] = ("with",)
    data: Annotated[Path | None, Option("Local data of the tasks.", metavar="DIR")] = None
    include: Annotated[
        tuple[Path, ...],
        Option("A folder with tasks of your own, repeatable.", metavar="DIR"),
    ] = ()
    limit: Annotated[int | None, Option("Documents of each task and length.", min=1)] = None
    batch_size: Annotated[int, Option("Prompts that are read at once.", min=1)] = 1
    chat_template: Annotated[
        bool,
        Option(
            "Ask in the tokenizer's chat template.",
            ("--chat/--no-chat",),
            earlier="--chat-template",
        ),
    ] = False
    # None for those the folder was begun with, or as many as are idle.
    threads: Annotated[int | None, THREADS] = None
