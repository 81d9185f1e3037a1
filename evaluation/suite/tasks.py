"""Find tasks of lm-evaluation-harness by name, and make their prompts for each length."""

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
# Below 1,024 tokens, the harness's code of these tasks tries forever to make a prompt.
ENDLESS = ("ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot")


@attrs.frozen
class How:
    """How tasks are asked: at which lengths, how many documents of each, and so on."""

    lengths: tuple[int, ...]
    limit: int | None
    later: bool
    chat: bool
    batch_size: int
    beyond_positions: bool


@attrs.frozen(eq=False)
class Prompts:
    """A task's prompts at one length, None for a length of its own: each document's requests."""

    name: str
    length: int | None
    task: Task
    requests: tuple[tuple[Instance, ...], ...]

    def digest(self, document: int) -> str:
        """Return a hash of all that is asked about a document, to notice that it has changed."""
        asked = repr([request.args for request in self.requests[document]])
        return hashlib.sha256(asked.encode()).hexdigest()[:16]


def find_tasks(names: Sequence[str], include: Sequence[Path]) -> dict[str, Path]:
    """Return the single tasks behind names of tasks, groups and tags, with their folders."""
    with quiet():
        manager = TaskManager(include_path=[*FIRST, *include], include_defaults=False)
        if any(name not in manager.task_index for name in names):
            manager = TaskManager(include_path=list(include))
    index: Mapping[str, Any] = manager.task_index
    for name in names:
        if name not in index:
            near = difflib.get_close_matches(name, index, n=5, cutoff=0.5)
            raise ValueError(
                "tasks must be names of lm-evaluation-harness's tasks, groups or tags, got "
                f"{name!r}; near: {', '.join(near) or 'none'}"
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


def make_prompts(tasks: Mapping[str, Path], how: How, lm: PolicyLM) -> list[Prompts]:
    """Load tasks and make the prompts of each length; the same in every process.

    A task has lengths if its code makes documents with ``max_length``. Others are taken once.
    """
    found = []
    for name, folder in tasks.items():
        for length in how.lengths:
            if name in ENDLESS and length < 1024:
                raise ValueError(f"lengths must be at least 1024 for {name}, got {length}")
            loaded = _load(name, folder, length, lm.tokenizer.name_or_path)
            made = [_prompts(own, task, length, how, lm) for own, task in loaded.items()]
            found += made
            if all(each.length is None for each in made):
                break
    return found


def _load(name: str, folder: Path, length: int, tokenizer: str) -> dict[str, Task]:
    """Load a task, or a group of them, with random generators in the state of a new process."""
    metadata = {"max_seq_lengths": [length], "tokenizer": tokenizer}
    sys.modules.pop("lm_eval.tasks.ruler.cwe_utils", None)  # has a random state of its own
    random.seed(42)
    np.random.seed(42)
    try:
        with quiet():
            manager = TaskManager(include_path=folder, include_defaults=False, metadata=metadata)
            loaded: dict[str, Task] = manager.load([name])["tasks"]
            return loaded
    except Exception as error:  # whatever a task's own code raises
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"task {name} could not be loaded at {length} tokens: {said}") from error


def _prompts(name: str, task: Task, length: int, how: How, lm: PolicyLM) -> Prompts:
    if task.OUTPUT_TYPE == "loglikelihood_rolling" or getattr(task, "UNSAFE_CODE", False):
        raise ValueError(
            f"tasks must ask for answers that are not run as code, got {name} ({task.OUTPUT_TYPE})"
        )
    if not any(averages(task, metric) for metric in task.aggregation()):
        raise ValueError(
            f"tasks must have a score for each document, whose mean is the result, got {name} with "
            f"{', '.join(task.aggregation()) or 'none'}"
        )
    with quiet():
        task.set_fewshot_seed(1234)  # the harness's own
        task.build_all_requests(
            limit=how.limit,
            apply_chat_template=how.chat,
            fewshot_as_multiturn=how.chat,
            chat_template=lm.apply_chat_template if how.chat else None,
            tokenizer_name=lm.tokenizer_name if how.chat else "",
        )
    grouped: dict[int, list[Instance]] = {}
    for request in task.instances:
        grouped.setdefault(request.doc_id, []).append(request)
    requests = tuple(tuple(grouped[number]) for number in sorted(grouped))
    made = callable(getattr(task.config, "custom_dataset", None))
    takes = made and {each[0].doc.get("max_length") for each in requests} == {length}
    return Prompts(name, length if takes else None, task, requests)


def averages(task: Task, metric: str) -> bool:
    """True if a metric of a task is the mean of its documents' scores, such as accuracy."""
    aggregate = task.aggregation().get(metric)
    owned = getattr(aggregate, "__module__", "") == "lm_eval.api.metrics"
    return not owned or aggregate.__name__ in ("mean", "nanmean")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the harness's bars, prints and log lines in a ``with`` block."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
