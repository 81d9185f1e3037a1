"""Ask what a folder lacks, cell by cell, and score answers as lm-evaluation-harness does."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import attrs
from lm_eval.api.instance import Instance

from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.progress import Progress
from kvpolicy.evaluation.readable import check_known, check_positions
from kvpolicy.evaluation.results import as_json, write_all
from kvpolicy.evaluation.suite.folder import SETTINGS, Cell, Sample, load_cells, save_cell
from kvpolicy.evaluation.suite.tasks import How, Prompts, averages, quiet
from kvpolicy.evaluation.variant import Variant, in_users_words, naming
from kvpolicy.integrations.lm_eval import PolicyLM
from kvpolicy.integrations.lm_eval.splitters import document_end
from kvpolicy.integrations.transformers.checking import check_model
from kvpolicy.policy import CachePolicy


def answering_model(loaded: Loaded, policy: CachePolicy | None, how: How) -> PolicyLM:
    """Wrap a loaded model for the harness, under a policy; its weights are shared."""
    with quiet():
        return PolicyLM(
            pretrained=loaded.model,
            tokenizer=loaded.tokenizer,
            policy=policy,
            question="later" if how.later else "with",
            batch_size=how.batch_size,
            max_length=2**31 - 1,  # a prompt is not cut: it is refused or read whole
        )


def check_prompts(
    loaded: Loaded, prompts: Sequence[Prompts], chosen: Sequence[Variant], how: How, lm: PolicyLM
) -> None:
    """Raise ValueError unless the model can read every prompt under every policy."""
    longest, remedy = 0, "smaller --lengths"
    for each in prompts:
        for request in (it for requests in each.requests for it in requests):
            what = f"document {request.doc_id} of {each.name}"
            prompt, follows = request.args[0], request.args[1]
            if isinstance(follows, str):
                answer = len(lm.tok_encode(follows, add_special_tokens=False))
            else:
                answer = int(follows.get("max_gen_toks", lm.max_gen_toks))
            ids = lm.tok_encode(prompt)
            if prompt.strip():
                check_known(loaded.tokenizer, ids, what)
            check_positions(
                loaded, len(ids), answer, beyond=how.beyond_positions, what=what, remedy=remedy
            )
            longest = max(longest, len(ids) + answer)
            if how.later:
                document_end(each.name, request.doc, prompt)
    found = check_model(loaded.model)
    for variant in chosen:
        with naming(variant.label):
            reason = found.refusal_of(variant.policy, longest)
        if reason is not None:
            raise ValueError(in_users_words(reason, variant.policy, variant.label))


def fill(
    folder: Path,
    settings: Mapping[str, Any],
    loaded: Loaded,
    prompts: Sequence[Prompts],
    chosen: Sequence[Variant],
    how: How,
    progress: Progress,
) -> Iterator[str]:
    """Answer the documents that a folder lacks, and keep each batch of them at once.

    All policies answer a task before the next one begins. Yields a line for each finished cell.
    """
    asked, cells = [], {cell.file: cell for cell in load_cells(folder)}
    for each in prompts:
        for variant in chosen:
            new = Cell(each.name, each.length, how.later, variant.label, repr(variant.policy))
            asked.append((each, variant.policy, _continued(cells.get(new.file, new), new, each)))
    write_all(folder, {SETTINGS: as_json(settings)})
    total, done = sum(len(each.requests) for each, _, _ in asked), 0
    for each, policy, cell in asked:
        kept = {sample.document for sample in cell.samples}
        missing = [number for number in range(len(each.requests)) if number not in kept]
        done += len(each.requests) - len(missing)
        lm = answering_model(loaded, policy, how)
        for start in range(0, len(missing), how.batch_size):
            progress(str(cell), done, total)
            batch = missing[start : start + how.batch_size]
            cell = attrs.evolve(cell, samples=(*cell.samples, *_answer(each, batch, lm)))
            save_cell(folder, cell)
            done += len(batch)
        before = f", {len(kept):,} of them answered earlier" if kept else ""
        yield f"{cell}: {cell.metric} {cell.mean:.3f} of {len(cell.samples):,}{before}"


def _continued(there: Cell, asked: Cell, prompts: Prompts) -> Cell:
    """Return what a folder holds of a cell; raise ValueError if it was asked in another way."""
    if there.policy != asked.policy:
        raise ValueError(
            f"out must be a folder of the same policies, got one where {asked.method} was "
            f"{there.policy}, got {asked.policy}; give another --out"
        )
    for sample in there.samples:
        number = sample.document
        if number < len(prompts.requests) and prompts.digest(number) != sample.prompt:
            raise ValueError(
                f"out must be a folder of the same prompts, got one where document {number} of "
                f"{asked.place} was another: the task or its data has changed; give another --out"
            )
    return there


def _answer(prompts: Prompts, documents: Sequence[int], lm: PolicyLM) -> list[Sample]:
    groups = [
        [dataclasses.replace(it, resps=[], filtered_resps={}) for it in prompts.requests[number]]
        for number in documents
    ]
    asked = [each for group in groups for each in group]
    repeated = [each for each in asked for _ in range(each.repeats or 1)]
    with quiet():
        responses = getattr(lm, asked[0].request_type)(repeated, disable_tqdm=True)
        for request, response in zip(repeated, responses, strict=True):
            request.resps.append(response)
        prompts.task._instances = asked  # the ones that `apply_filters` filters
        prompts.task.apply_filters()
    costs = iter(lm.last_costs)
    found = []
    for number, group in zip(documents, groups, strict=True):
        own = [next(costs) for request in group for _ in range(request.repeats or 1)]
        most = max(own, key=lambda cost: cost.bytes_held)
        found.append(
            Sample(
                document=number,
                prompt=prompts.digest(number),
                answers=[str(each.resps[0]) for each in group],
                scores=_scores(prompts, group),
                tokens_seen=most.prompt_tokens,
                tokens_kept=most.kept_tokens,
                bytes_held=most.bytes_held,
                prefill_seconds=sum(cost.prefill_seconds for cost in own),
                total_seconds=sum(cost.total_seconds for cost in own),
            )
        )
    return found


def _scores(prompts: Prompts, requests: Sequence[Instance]) -> dict[str, float]:
    """Return a document's scores by metric, the task's first metric first."""
    scores: dict[str, float] = {}
    filters = list(requests[0].filtered_resps)
    for each in filters:
        results = [request.filtered_resps[each] for request in requests]
        for metric, value in prompts.task.process_results(requests[0].doc, results).items():
            name = "score" if metric == str(prompts.length) else metric
            if metric.isdecimal() and name == metric:  # RULER's metric of another length
                continue
            if isinstance(value, Real) and averages(prompts.task, metric):
                scores[name if len(filters) == 1 else f"{name},{each}"] = float(value)
    if not scores or not all(0 <= value <= 100 for value in scores.values()):
        raise ValueError(
            f"tasks must score every document, in [0, 1] or [0, 100], got {prompts.name} with "
            f"{scores or 'no such score'}"
        )
    return scores
