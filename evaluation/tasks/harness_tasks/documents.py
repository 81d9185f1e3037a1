"""Add documents to a task's configuration: from local data, or made for a tokenizer."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.evaluation.tasks.harness_tasks.longbench import (
    is_longbench,
    longbench_file,
    longbench_rows,
)
from kvpolicy.evaluation.tasks.harness_tasks.ruler import Rows, RulerSource, is_ruler

OWN = "kvpolicy.evaluation.tasks."


@attrs.frozen
class Wanted:
    """Which documents to load for harness tasks: local data, prompt lengths and their number.

    Args:
        data: A folder with local data; None for the harness's own ways.
        lengths: Prompt lengths in tokens, of the tasks that have one.
        tokenizer: A tokenizer, its name, or None.
        limit: Documents at each length, or of each task; None for all.
    """

    data: Path | None
    lengths: tuple[int, ...]
    tokenizer: Any
    limit: int | None

    def tokenizer_for(self, task: str) -> Any:
        """Return the tokenizer for making a task's prompts; ValueError if none was given.

        Raises:
            ValueError: There is none.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"tokenizer must be given for the task {task}, whose prompts have a length in "
                "tokens, got None"
            )
        return as_tokenizer(self.tokenizer)


def with_documents(config: Mapping[str, Any], wanted: Wanted) -> dict[str, Any] | None:
    """Return a harness task's configuration with documents made from local data.

    Args:
        config: As the harness reads it from YAML.
        wanted: Which documents.

    Returns:
        The configuration; None where the harness is to load the task's documents by itself.

    Raises:
        ValueError: The data lacks what the task needs, or there is no tokenizer, or the length is
            none for the task.
    """
    if is_longbench(config):
        if wanted.data is None:
            return None
        file = longbench_file(config, wanted.data)
        rows = longbench_rows(file)[: wanted.limit]
        return _holding(config, rows, {"documents": f"longbench/{file.name}"})
    make = config.get("custom_dataset")
    if is_ruler(config):
        assert make is not None
        source = RulerSource(wanted.tokenizer_for(config["task"]), wanted.data, wanted.limit)
        return _at_lengths(config, wanted, lambda length: source.rows(config["task"], make, length))
    if str(getattr(make, "__module__", "")).startswith(OWN):
        assert make is not None
        tokenizer = wanted.tokenizer_for(config["task"])

        def own(length: int) -> tuple[Rows, dict[str, str]]:
            made = make(
                max_seq_lengths=[length],
                tokenizer=tokenizer,
                data=wanted.data,
                limit=wanted.limit,
            )
            return made["test"].to_list(), make.__globals__["MADE_OF"]

        return _at_lengths(config, wanted, own)
    return None


def _at_lengths(
    config: Mapping[str, Any],
    wanted: Wanted,
    rows_of: Callable[[int], tuple[Rows, dict[str, str]]],
) -> dict[str, Any]:
    """Return a task's configuration with documents of each length, and a metric per length."""
    rows: Rows = []
    made_of = {}
    for length in wanted.lengths:
        found, made_of[str(length)] = rows_of(length)
        rows += found
    changed = _holding(config, rows, made_of)
    metrics = config["metric_list"]
    if all(str(each["metric"]).isdecimal() for each in metrics):
        changed["metric_list"] = [{**metrics[0], "metric": str(each)} for each in wanted.lengths]
        changed["process_results"] = _own_length(config["process_results"])
    return changed


def _own_length(process: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Wrap RULER's scoring function to return only the score at the document's own length."""

    def own(doc: Mapping[str, Any], results: list[str]) -> dict[str, float]:
        length = str(doc["max_length"])
        return {length: process(doc, results)[length]}

    return own


def _holding(config: Mapping[str, Any], rows: Rows, made_of: Mapping[str, Any]) -> dict[str, Any]:
    import datasets

    def documents(**_: Any) -> dict[str, Any]:
        return {config["test_split"]: datasets.Dataset.from_list(rows)}

    metadata = {**config.get("metadata", {}), "made_of": made_of}
    return {**config, "custom_dataset": documents, "metadata": metadata}


def as_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer as it is, or load it from a name or folder."""
    if isinstance(tokenizer, str | Path):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tokenizer)
    return tokenizer


@contextlib.contextmanager
def without_downloads() -> Iterator[None]:
    """Block nltk's downloads in a ``with`` block in which RULER's code is imported."""
    import nltk

    before, nltk.download = nltk.download, lambda *_, **__: False
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the harness logs its downloads
            yield
    finally:
        nltk.download = before
