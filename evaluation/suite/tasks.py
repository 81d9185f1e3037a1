"""Find tasks of lm-evaluation-harness by name, and make their prompts for each length."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import logging
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import lm_eval.tasks
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from kvpolicy.integrations.lm_eval import PolicyLM

HARNESS = Path(lm_eval.tasks.__file__).parent
# Looked through first: to list all of the harness's 14,000 names takes 15 seconds.
FIRST = (HARNESS / "ruler", HARNESS / "longbench")
# The field in which a document says for which prompt length it was made, as RULER's do.
LENGTH_FIELD = "max_length"
SEED = 42
FEWSHOT_SEED = 1234  # the harness's own
# Below, the harness's code of these tasks tries forever to make a prompt that is short enough.
_LEAST = 1024
_ENDLESS = ("ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot")


@attrs.frozen(eq=False)
class Prompts:
    """A task's prompts at one length, as the harness makes them.

    Args:
        name: The task's name.
        length: Tokens that the prompts were made for; None for a task with prompts of its own.
        task: The task, which scores the answers.
        requests: Those of each document; a multiple choice has one for each choice.
    """

    name: str
    length: int | None
    task: Task
    requests: tuple[tuple[Instance, ...], ...]

    def digest(self, document: int) -> str:
        """Return a hash of all that is asked about a document, to notice that it has changed."""
        asked = repr([request.args for request in self.requests[document]])
        return hashlib.sha256(asked.encode()).hexdigest()[:16]


def find_tasks(names: Sequence[str], include: Sequence[Path]) -> dict[str, Path]:
    """Return the single tasks behind names of tasks, groups and tags, with their folders.

    No documents are loaded.

    Args:
        names: As `lm_eval --tasks` takes them.
        include: Folders with further tasks.

    Raises:
        ValueError: Names are unknown; says which are near.
    """
    with quiet():
        manager = TaskManager(include_path=[*FIRST, *include], include_defaults=False)
        if any(name not in manager.task_index for name in names):
            manager = TaskManager(include_path=list(include))
    index: Mapping[str, Any] = manager.task_index
    wrong = []
    for name in names:
        if name not in index:
            near = difflib.get_close_matches(name, index, n=5, cutoff=0.5)
            wrong.append(f"{name!r}; near: {', '.join(near) or 'none'}")
    if wrong:
        raise ValueError(
            f"tasks must be names of the harness's tasks, groups or tags, got {'; '.join(wrong)}"
        )
    found = dict.fromkeys(leaf for name in names for leaf in _leaves(name, index))
    return {leaf: Path(index[leaf].yaml_path or HARNESS).parent for leaf in found}


def _leaves(name: str, index: Mapping[str, Any]) -> Iterator[str]:
    entry = index[name]
    kind = entry.kind.name
    members = sorted(entry.tags) if kind == "TAG" else (entry.cfg or {}).get("task")
    # A group that gives its members settings of their own is loaded as a whole.
    if kind in ("TAG", "GROUP") and all(isinstance(each, str) for each in members or ()):
        for each in members or ():
            yield from _leaves(each, index)
    else:
        yield name


def make_prompts(
    tasks: Mapping[str, Path],
    lengths: Sequence[int],
    lm: PolicyLM,
    *,
    limit: int | None,
    chat: bool,
) -> list[Prompts]:
    """Load tasks and make the prompts of each length; the same in every process.

    Args:
        tasks: From `find_tasks`.
        lengths: For tasks that are made for a length. A task whose documents do not say that they
            are of the first length is taken once, with ``length=None``.
        lm: The model with full context, for its tokenizer and chat template.
        limit: Documents of each task and length; None for all.
        chat: Whether prompts are a user's turn of a chat.

    Raises:
        ValueError: A task cannot be loaded, or has no score for each of its documents.
    """
    found = []
    for name, folder in tasks.items():
        for length in lengths:
            if name in _ENDLESS and length < _LEAST:
                raise ValueError(f"lengths must be at least {_LEAST} for {name}, got {length}")
            made = [
                _prompts(own, task, length, lm, limit=limit, chat=chat)
                for own, task in _load(name, folder, length, lm.tokenizer.name_or_path).items()
            ]
            found += made
            if all(each.length is None for each in made):
                break
    return found


def _load(name: str, folder: Path, length: int, tokenizer: str) -> dict[str, Task]:
    """Load a task, or a group of them, with the random state that every process begins with."""
    metadata = {"max_seq_lengths": [length], "tokenizer": tokenizer}
    sys.modules.pop("lm_eval.tasks.ruler.cwe_utils", None)  # has a random state of its own
    states = random.getstate(), np.random.get_state()
    random.seed(SEED)
    np.random.seed(SEED)
    try:
        with quiet():
            manager = TaskManager(include_path=folder, include_defaults=False, metadata=metadata)
            loaded: dict[str, Task] = manager.load([name])["tasks"]
            return loaded
    except Exception as error:  # whatever a task's own code raises
        said = " ".join(str(error).split()) or type(error).__name__
        at = f" at {length} tokens" if "max_seq_length" in said else ""
        raise ValueError(f"task {name} could not be loaded{at}: {said}") from error
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _prompts(
    name: str, task: Task, length: int, lm: PolicyLM, *, limit: int | None, chat: bool
) -> Prompts:
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise ValueError(
            f"tasks must have prompts, got {name}, which scores whole texts: there is nothing to "
            "decode after them"
        )
    if getattr(task, "UNSAFE_CODE", False):
        raise ValueError(f"tasks must not run code that a model writes, got {name}")
    if not any(averages(task, metric) for metric in task.aggregation()):
        raise ValueError(
            f"tasks must have a score for each document, whose mean is the result, got {name} with "
            f"{', '.join(task.aggregation()) or 'none'}"
        )
    with quiet():
        task.set_fewshot_seed(FEWSHOT_SEED)
        task.build_all_requests(
            limit=limit,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            chat_template=lm.apply_chat_template if chat else None,
            tokenizer_name=lm.tokenizer_name if chat else "",
        )
    grouped: dict[int, list[Instance]] = {}
    for request in task.instances:
        grouped.setdefault(request.doc_id, []).append(request)
    requests = tuple(tuple(grouped[number]) for number in sorted(grouped))
    said = {each[0].doc.get(LENGTH_FIELD) for each in requests}
    return Prompts(name, length if said == {length} else None, task, requests)


def averages(task: Task, metric: str) -> bool:
    """True if a metric of a task is the mean of its documents' scores, such as accuracy."""
    aggregate = task.aggregation().get(metric)
    owned = getattr(aggregate, "__module__", "") == "lm_eval.api.metrics"
    return not owned or aggregate.__name__ in ("mean", "nanmean")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the harness's bars, prints and log lines in a ``with`` block."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
