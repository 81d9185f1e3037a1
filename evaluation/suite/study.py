"""Run a comparison, from its settings to its folder of results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import torch

from kvpolicy.checks import check_count
from kvpolicy.evaluation.defaults import default_tsp_layer
from kvpolicy.evaluation.extras import require
from kvpolicy.evaluation.models import Loaded, load, load_tokenizer
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.results import check_folder, check_threads, default_threads, environment
from kvpolicy.evaluation.suite.description import Description
from kvpolicy.evaluation.suite.filling import expected_samples, fill
from kvpolicy.evaluation.suite.folder import SAMPLES, SETTINGS, Results, check_same, opened
from kvpolicy.evaluation.suite.folder import load as load_results
from kvpolicy.evaluation.suite.runner import Listener, Runner
from kvpolicy.evaluation.suite.sample import FULL_CONTEXT, Method
from kvpolicy.evaluation.suite.settings import Settings
from kvpolicy.evaluation.variant import Variant, variants


def check(settings: Settings, out: Path) -> None:
    """Check an evaluation's settings before a model is loaded.

    Raises:
        ValueError: A setting is out of its range, or ``out`` can hold no results.
        MissingExtraError: The harness is not installed.
    """
    require("lm_eval", extra="eval")
    from kvpolicy.integrations.lm_eval.model import QUESTIONS

    check_folder(out, (SETTINGS, SAMPLES))
    if not settings.tasks:
        raise ValueError("tasks must name at least one task, got none")
    for name, least in (("limit", 1), ("batch_size", 1), ("threads", 1)):
        value = getattr(settings, name)
        if value is not None:
            check_count(name, value, minimum=least)
    for length in settings.lengths:
        check_count("lengths", length, minimum=1)
    if not settings.questions or set(settings.questions) - set(QUESTIONS):
        raise ValueError(
            f"question must be {' or '.join(QUESTIONS)}, got "
            f"{', '.join(settings.questions) or 'none'}"
        )
    for name, folder in (("data", settings.data), *(("include", it) for it in settings.include)):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"{name} must be a folder, got {folder}")
    if settings.threads is not None:
        check_threads(settings.threads)


def with_full_context(chosen: Sequence[Variant]) -> list[Variant]:
    """Return the policies with full context put first, exactly once."""
    others = [each for each in chosen if each.name != FULL_CONTEXT]
    return [*variants([FULL_CONTEXT]), *others]


def run(
    settings: Settings,
    out: Path | str,
    *,
    policies: Sequence[str] = (),
    rates: Sequence[float] = (0.1,),
    chosen: Sequence[Variant] | None = None,
    loader: Callable[..., Loaded] = load,
    progress: Progress = silent,
    listener: Listener | None = None,
) -> Results:
    """Evaluate every policy on every task, length and question; go on with a folder, or extend it.

    Full context is always asked, once for each task, length and question. What is in the folder
    stays, and is not asked again. Sets the number of torch's threads.

    Args:
        settings: What to ask.
        out: The folder of results: new, or one of the same model, machine and versions, to which
            other policies, tasks, lengths, questions and more samples are added.
        policies: Names of registered policies, at all of ``rates``.
        rates: KV retention rates.
        chosen: The policies themselves, in place of names and rates.
        loader: Loads the model, called as `kvpolicy.evaluation.models.load` is.
        progress: Told of every batch.
        listener: Told of every finished cell.

    Returns:
        All results of the folder; what was asked for is finished.

    Raises:
        ValueError: What is asked for cannot be done, or ``out`` is of something else.
        MissingExtraError: The harness is not installed.

    Example:
        >>> settings = Settings("needle", tasks=("needle_one_hop",), lengths=(512,), limit=20)
        >>> results = run(settings, "results", policies=["snapkv", "fastkv"])  # doctest: +SKIP
    """
    out = Path(out)
    check(settings, out)
    if chosen is None:
        chosen = named_policies(settings.model, policies, rates)
    chosen = with_full_context(chosen)
    threads = settings.threads or _threads_of(out) or default_threads()
    torch.set_num_threads(threads)
    tokenizer = load_tokenizer(settings.model)
    _check_template(settings, tokenizer)
    tasks = _load_tasks(settings, tokenizer, progress)
    progress(f"loading model {settings.model}", 0, 1)
    loaded = loader(settings.model, dtype=settings.dtype, device=settings.device)
    description = _description(attrs.evolve(settings, threads=threads), loaded, tasks, chosen)
    check_same(out, description)
    runner = _runner(settings, loaded, tasks, chosen)
    progress("preparing prompts", 0, 1)
    documents = runner.documents()
    expected = expected_samples(documents, settings.questions, list(description.methods))
    with opened(out, attrs.evolve(description, expected=expected)) as folder:
        fill(
            folder,
            runner,
            documents,
            batch_size=settings.batch_size,
            progress=progress,
            listener=listener,
        )
    return load_results(out)


def named_policies(model: str, names: Sequence[str], rates: Sequence[float]) -> list[Variant]:
    """Build registered policies by name for a model, at every retention rate."""
    if not names:
        return []
    return variants(names, rates, tsp_layer=default_tsp_layer(model))


def _load_tasks(settings: Settings, tokenizer: Any, progress: Progress) -> dict[str, Any]:
    from kvpolicy.evaluation.suite.harness import quiet
    from kvpolicy.evaluation.tasks.harness_tasks import knowing, load_tasks, task_manager

    with quiet():
        manager = task_manager(settings.data, settings.lengths, tokenizer, include=settings.include)
        manager = knowing(settings.tasks, manager)
    progress("loading tasks", 0, 1)
    with quiet():
        try:
            return load_tasks(settings.tasks, manager, limit=settings.limit)
        except OSError as error:  # network errors are of this class
            remedy = "" if settings.data else "; without a network, give their data by --data DIR"
            raise OSError(f"--tasks could not be loaded: {error}{remedy}") from error


def _runner(
    settings: Settings, loaded: Loaded, tasks: dict[str, Any], chosen: Sequence[Variant]
) -> Runner:
    from kvpolicy.evaluation.suite.harness import HarnessRunner

    return HarnessRunner(
        loaded,
        tasks,
        {each.label: each.policy for each in chosen},
        questions=settings.questions,
        limit=settings.limit,
        batch_size=settings.batch_size,
        chat_template=settings.chat_template,
        beyond_positions=settings.beyond_positions,
    )


def _check_template(settings: Settings, tokenizer: Any) -> None:
    if settings.chat_template and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"--chat needs a tokenizer with a chat template, got that of {settings.model},"
            " which has none"
        )


def _description(
    settings: Settings, loaded: Loaded, tasks: dict[str, Any], chosen: Sequence[Variant]
) -> Description:
    """Make the description of a new folder of results: settings, machine and methods."""
    asked = attrs.asdict(settings) | {
        "dtype": loaded.dtype,
        "fingerprint": fingerprint(loaded),
        "made_of": {name: made for name, task in tasks.items() if (made := _made_of(task))},
    }
    found = environment(loaded.model.device)
    found["versions"]["lm_eval"] = version("lm_eval")
    methods = {each.label: Method.of(each) for each in chosen}
    return Description(json.loads(json.dumps(asked, default=str)), found, methods, {})


def _made_of(task: Any) -> Any:
    """Return the origin of a task's documents, such as a local file, from the task's metadata."""
    return (task.config.metadata or {}).get("made_of")


def _threads_of(out: Path) -> int | None:
    """Return the number of threads recorded in a folder of results; None if it is new."""
    if not (out / SETTINGS).is_file():
        return None
    threads = load_results(out).description.settings.get("threads")
    return threads if isinstance(threads, int) else None


def fingerprint(loaded: Loaded) -> str:
    """Return a hash of a model's and its tokenizer's content, to notice that they changed.

    It covers the configuration, a sample of every parameter's values, and the vocabulary. How the
    model was loaded does not change it.
    """
    from kvpolicy.integrations.transformers.state.fingerprint import ModelFingerprint

    text, samples = ModelFingerprint.of(loaded.model).packed()
    vocabulary = json.dumps(loaded.tokenizer.get_vocab(), sort_keys=True)
    digest = hashlib.sha256(f"{text}\n{vocabulary}\n".encode())
    digest.update(samples.numpy().tobytes())
    return digest.hexdigest()[:16]
