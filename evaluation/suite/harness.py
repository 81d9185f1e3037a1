"""Answer lm-evaluation-harness tasks with one loaded model under many policies.

Prompts, filters and metrics are the harness's own. Only the loop is not: it goes document by
document, so that each is a line as soon as it is answered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task

from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.readable import check_known, check_positions
from kvpolicy.evaluation.refusals import in_users_words, naming
from kvpolicy.evaluation.suite.runner import Documents, Runner
from kvpolicy.evaluation.suite.sample import FULL_CONTEXT, Answer, Cell, Document
from kvpolicy.evaluation.suite.scoring import depth_of, prediction_of, references_of, scores_of
from kvpolicy.integrations.lm_eval import PolicyLM, RequestCosts
from kvpolicy.integrations.lm_eval.splitters import document_end
from kvpolicy.integrations.transformers.checking import check_model
from kvpolicy.policy import CachePolicy

if TYPE_CHECKING:
    from kvpolicy.integrations.lm_eval.model import Question

# The field in which RULER's documents say for which prompt length they were made.
LENGTH_FIELD = "max_length"
# The arguments of `HFLM` that limit the tokens it reads.
NO_LIMIT = 2**31 - 1


class HarnessRunner(Runner):
    """Runs tasks of lm-evaluation-harness on one loaded model under several policies.

    Args:
        loaded: The model.
        tasks: By name.
        policies: By method; full context among them.
        questions: Ways to ask, ``"with"``, ``"later"`` or both.
        limit: Documents of each task and length; None for all.
        batch_size: Prompts that are read at once.
        chat_template: Whether prompts are a user's turn of a chat.
        beyond_positions: Whether prompts may be longer than the model has positions for.
    """

    def __init__(
        self,
        loaded: Loaded,
        tasks: Mapping[str, Task],
        policies: Mapping[str, CachePolicy],
        *,
        questions: Sequence[str] = ("with",),
        limit: int | None = None,
        batch_size: int = 1,
        chat_template: bool = False,
        beyond_positions: bool = False,
    ) -> None:
        self.loaded = loaded
        self.tasks = dict(tasks)
        self.policies = dict(policies)
        self.questions = tuple(questions)
        self.limit = limit
        self.batch_size = batch_size
        self.chat_template = chat_template
        self.beyond_positions = beyond_positions
        self._models: dict[tuple[str, str], PolicyLM] = {}
        self._requests: dict[tuple[str, int], list[Instance]] = {}

    def documents(self) -> Documents:
        """Build the prompts of all tasks, and check every one before the first is asked."""
        with quiet():
            for name, task in self.tasks.items():
                self._build(name, task)
        found: dict[tuple[str, int | None], list[Document]] = {}
        for (name, number), requests in self._requests.items():
            length = requests[0].doc.get(LENGTH_FIELD)
            group = found.setdefault((name, None if length is None else int(length)), [])
            if self.limit is None or len(group) < self.limit:
                group.append(_document(self.tasks[name], number, requests))
        self._check(found)
        return found

    def answer(self, cell: Cell, documents: Sequence[Document]) -> list[Answer]:
        """Answer documents with the model as the harness does, and score the answers."""
        task = self.tasks[cell.task]
        groups = [
            [
                dataclasses.replace(each, resps=[], filtered_resps={})
                for each in self._requests[cell.task, document.id]
            ]
            for document in documents
        ]
        asked = [each for group in groups for each in group]
        with quiet():
            costs = iter(self._ask(self._model(cell.method, cell.question), asked))
            task._instances = asked  # the responses that `apply_filters` filters
            task.apply_filters()
        return [
            _answer(task, cell, group, [cost for _ in group for cost in next(costs)])
            for group in groups
        ]

    def _ask(self, model: PolicyLM, requests: Sequence[Instance]) -> list[list[RequestCosts]]:
        """Have the model answer harness requests, repeats included; return each request's costs."""
        repeated = [each for each in requests for _ in range(each.repeats or 1)]
        ask = getattr(model, repeated[0].request_type)
        for request, response in zip(repeated, ask(repeated, disable_tqdm=True), strict=True):
            request.resps.append(response)
        costs = iter(model.last_costs)
        return [[next(costs) for _ in range(each.repeats or 1)] for each in requests]

    def _model(self, method: str, question: str) -> PolicyLM:
        """Wrap the model to answer under a policy; its weights are not copied."""
        if (method, question) not in self._models:
            self._models[method, question] = PolicyLM(
                pretrained=self.loaded.model,
                tokenizer=self.loaded.tokenizer,
                policy=self.policies[method],
                question=cast("Question", question),
                batch_size=self.batch_size,
                # No prompt is cut off: one that is too long is refused, or read whole.
                max_length=NO_LIMIT,
            )
        return self._models[method, question]

    def _build(self, name: str, task: Task) -> None:
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            raise ValueError(
                f"tasks must have prompts, got {name}, which scores whole texts: there is nothing "
                "to decode after them"
            )
        model = self._model(FULL_CONTEXT, "with")
        task.build_all_requests(
            apply_chat_template=self.chat_template,
            fewshot_as_multiturn=self.chat_template,
            chat_template=model.apply_chat_template if self.chat_template else None,
            tokenizer_name=model.chat_template(True) if self.chat_template else "",
        )
        for request in task.instances:
            self._requests.setdefault((name, request.doc_id), []).append(request)

    def _check(self, documents: Documents) -> None:
        """Check that the model can read every prompt under every policy.

        Raises:
            ValueError: A prompt is longer than the model's positions, its question cannot be told
                from its document, or a policy cannot be applied to the model.
        """
        model = self._model(FULL_CONTEXT, "with")
        longest = 0
        for (name, _), group in documents.items():
            for document in group:
                for request in self._requests[name, document.id]:
                    longest = max(longest, self._tokens(model, name, request))
                    if "later" in self.questions:
                        document_end(name, request.doc, request.args[0])
        found = check_model(self.loaded.model)
        for method, policy in self.policies.items():
            with naming(method):
                reason = found.refusal_of(policy, longest)
            if reason is not None:
                said = in_users_words(reason, policy, method)
                said = said.removeprefix(f"{method} cannot be applied to this model: ")
                raise ValueError(f"{method} cannot be applied to {self.loaded.name}: {said}")

    def _tokens(self, model: PolicyLM, name: str, request: Instance) -> int:
        """Count a request's prompt and answer tokens, and check that the model can read as many."""
        prompt, follows = request.args[0], request.args[1]
        what = f"document {request.doc_id} of {name}"
        if isinstance(follows, str):
            answer = len(model.tok_encode(follows, add_special_tokens=False))
        else:
            answer = int(follows.get("max_gen_toks", model.max_gen_toks))
        ids = model.tok_encode(prompt)
        if prompt.strip():
            check_known(self.loaded.tokenizer, ids, what)
        check_positions(
            self.loaded,
            len(ids),
            answer,
            beyond=self.beyond_positions,
            what=what,
            remedy="smaller --lengths, other --tasks",
        )
        return len(ids) + answer


def _document(task: Task, number: int, requests: Sequence[Instance]) -> Document:
    doc = requests[0].doc
    prompt = "\n".join(dict.fromkeys(request.args[0] for request in requests))
    references = references_of(task, doc)
    return Document(number, prompt, references, depth_of(task.task_name, doc, prompt, references))


def _answer(
    task: Task, cell: Cell, requests: Sequence[Instance], costs: Sequence[RequestCosts]
) -> Answer:
    """Make one document's `Answer` from its requests: prediction, scores, cache size and time."""
    most = max(costs, key=lambda cost: cost.bytes_held)
    return Answer(
        prediction=prediction_of(task, requests),
        scores=scores_of(task, cell.length, requests),
        tokens_seen=most.prompt_tokens,
        tokens_kept=most.kept_tokens,
        bytes_held=most.bytes_held,
        prefill_seconds=sum(cost.prefill_seconds for cost in costs),
        total_seconds=sum(cost.total_seconds for cost in costs),
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence lm-evaluation-harness's progress bars and log lines."""
    logger: Any = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
