"""Read LongBench from local files, in the form of the harness's tasks."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpolicy.evaluation.text_files import read_text

DATASET = "LongBench"


def is_longbench(config: Mapping[str, Any]) -> bool:
    """True if a harness task's configuration belongs to LongBench."""
    return str(config.get("dataset_path", "")).endswith(f"/{DATASET}")


def longbench_file(config: Mapping[str, Any], data: Path) -> Path:
    """Return the local file of a LongBench task: ``data/longbench/<dataset>.jsonl``.

    Raises:
        ValueError: Nothing lies there.
    """
    file = data / "longbench" / f"{config['dataset_name']}.jsonl"
    if not file.is_file():
        raise ValueError(
            f"data must hold longbench/{file.name} for the task {config['task']}, got none in "
            f"{data}; put it there, or leave data out to let the harness fetch it"
        )
    return file


def longbench_rows(file: Path) -> list[dict[str, Any]]:
    """Read LongBench documents from JSON lines, with the harness's column names.

    The question is called ``input`` in LongBench's own files; lists may be written as texts.

    Raises:
        ValueError: A line is no document of LongBench; names it.
    """
    lines = read_text(file, "LongBench file").split("\n")  # texts may hold other line ends
    return [
        _row(line, f"line {number} of {file.name}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} must be a JSON object, got no JSON: {error.msg}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(entry).__name__}")
    question = entry.get("question", entry.get("input"))
    answers = _list(entry.get("answers"))
    if not isinstance(entry.get("context"), str) or not isinstance(question, str) or not answers:
        raise ValueError(
            f"{where} must have a context, an input (or question) and answers, got the fields "
            f"{', '.join(entry)}"
        )
    return {
        "context": entry["context"],
        "question": question,
        "answers": answers,
        "all_classes": _list(entry.get("all_classes")),
        "length": entry.get("length"),
        "_id": str(entry.get("_id", "")),
    }


def _list(value: Any) -> list[str]:
    """Return a document's field as a list of texts; the field may be text such as ``"['a']"``."""
    if isinstance(value, str):
        try:
            read = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            read = None
        value = read if isinstance(read, list) else [value]
    return [str(each) for each in value or ()]
