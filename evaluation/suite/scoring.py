"""Turn a harness document and its responses into the fields of a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task

# Tasks with needles whose documents do not say how deep the needle is.
NEEDLES = "niah_"


def references_of(task: Task, doc: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the reference answers of a document, any of which counts as right."""
    target = task.doc_to_target(doc)
    if task.OUTPUT_TYPE == "multiple_choice" and isinstance(target, int):
        target = task.doc_to_choice(doc)[target]
    several = target if isinstance(target, list | tuple) else [target]
    return tuple(str(each) for each in several)


def depth_of(
    name: str, doc: Mapping[str, Any], prompt: str, references: Sequence[str]
) -> float | None:
    """Return the needle's depth in a prompt, from 0 at its start to 1; None if unknown.

    What the document says itself (``depth``), or the place of a needle task's only reference,
    where it stands in the prompt once.

    Args:
        name: The task's.
        doc: The document.
        prompt: The prompt.
        references: Of the document.
    """
    said = doc.get("depth")
    if isinstance(said, Real):
        return float(said)
    if not name.startswith(NEEDLES) or len(references) != 1 or prompt.count(references[0]) != 1:
        return None
    return prompt.index(references[0]) / len(prompt)


def prediction_of(task: Task, requests: Sequence[Instance]) -> str:
    """Return the model's answer as text: the generated text after filtering, or the choice."""
    responses = [next(iter(request.filtered_resps.values())) for request in requests]
    if task.OUTPUT_TYPE == "generate_until":
        return str(responses[0])
    likeliest = max(range(len(requests)), key=lambda index: float(responses[index][0]))
    return str(requests[likeliest].args[1]).strip()


def scores_of(task: Task, length: int | None, requests: Sequence[Instance]) -> dict[str, float]:
    """Return a document's scores by metric, for each of the task's filters.

    Args:
        task: The task.
        length: Tokens that the prompt was made for, if it was.
        requests: Of the document, with filtered responses.

    Raises:
        ValueError: The task has no score that is one of a single document, in [0, 1] or [0, 100].
    """
    scores: dict[str, float] = {}
    filters = list(requests[0].filtered_resps)
    for each in filters:
        results = [request.filtered_resps[each] for request in requests]
        for metric, value in task.process_results(requests[0].doc, results).items():
            named = _metric(task, metric, length)
            if named is None or not isinstance(value, Real):
                continue
            scores[named if len(filters) == 1 else f"{named},{each}"] = float(value)
    outside = {name: value for name, value in scores.items() if not 0 <= value <= 100}
    if not scores or outside:
        raise ValueError(
            f"tasks must score every document, in [0, 1] or [0, 100], got {task.task_name} with "
            f"{outside or 'no such score'}"
        )
    return scores


def _metric(task: Task, metric: str, length: int | None) -> str | None:
    """Return the name under which a metric is saved; None for a metric that averages no samples.

    RULER names its metric after each length, and scores those of other prompts -1.
    """
    if metric.isdecimal():
        return "score" if metric == str(length) else None
    aggregate = task.aggregation().get(metric)
    owned = getattr(aggregate, "__module__", "") == "lm_eval.api.metrics"
    if owned and aggregate.__name__ not in ("mean", "nanmean"):
        return None
    return metric
