"""Ask a task's prompts under a policy, and score the answers as lm-evaluation-harness does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from numbers import Real

from lm_eval.api.instance import Instance

from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.readable import check_known, check_positions
from kvpolicy.evaluation.refusals import in_users_words, naming
from kvpolicy.evaluation.suite.folder import Sample
from kvpolicy.evaluation.suite.tasks import Prompts, averages, quiet
from kvpolicy.evaluation.variant import Variant
from kvpolicy.integrations.lm_eval import PolicyLM
from kvpolicy.integrations.lm_eval.splitters import document_end
from kvpolicy.integrations.transformers.checking import check_model
from kvpolicy.policy import CachePolicy

# What limits the tokens that `HFLM` reads: a prompt is not cut, it is refused or read whole.
_NO_LIMIT = 2**31 - 1


def answering_model(
    loaded: Loaded, policy: CachePolicy | str, *, later: bool = False, batch_size: int = 1
) -> PolicyLM:
    """Wrap a loaded model for the harness, under a policy; its weights are shared."""
    return PolicyLM(
        pretrained=loaded.model,
        tokenizer=loaded.tokenizer,
        policy=policy,
        question="later" if later else "with",
        batch_size=batch_size,
        max_length=_NO_LIMIT,
    )


def check_prompts(
    loaded: Loaded,
    prompts: Sequence[Prompts],
    chosen: Sequence[Variant],
    lm: PolicyLM,
    *,
    later: bool,
    beyond: bool,
) -> None:
    """Check that the model can read every prompt under every policy.

    Args:
        loaded: The model.
        prompts: All that will be asked.
        chosen: The policies.
        lm: The model for the harness.
        later: Whether questions are asked after the policy has chosen.
        beyond: Whether prompts may be longer than the model has positions for.

    Raises:
        ValueError: A prompt is too long, its question cannot be told from its document, or a policy
            cannot be applied to the model.
    """
    longest = 0
    for each in prompts:
        for number, requests in enumerate(each.requests):
            what = f"document {number} of {each.name}"
            for request in requests:
                prompt, follows = request.args[0], request.args[1]
                if isinstance(follows, str):
                    answer = len(lm.tok_encode(follows, add_special_tokens=False))
                else:
                    answer = int(follows.get("max_gen_toks", lm.max_gen_toks))
                ids = lm.tok_encode(prompt)
                if prompt.strip():
                    check_known(loaded.tokenizer, ids, what)
                remedy = "smaller --lengths, other --tasks"
                check_positions(loaded, len(ids), answer, beyond=beyond, what=what, remedy=remedy)
                longest = max(longest, len(ids) + answer)
                if later:
                    document_end(each.name, request.doc, prompt)
    found = check_model(loaded.model)
    for variant in chosen:
        with naming(variant.label):
            reason = found.refusal_of(variant.policy, longest)
        if reason is not None:
            said = in_users_words(reason, variant.policy, variant.label)
            said = said.removeprefix(f"{variant.label} cannot be applied to this model: ")
            raise ValueError(f"{variant.label} cannot be applied to {loaded.name}: {said}")


def answer(prompts: Prompts, documents: Sequence[int], lm: PolicyLM) -> list[Sample]:
    """Answer some documents of a task; what they cost is as `PolicyLM` measures it.

    Args:
        prompts: The task's.
        documents: Their numbers.
        lm: The model with the policy.

    Raises:
        ValueError: The task gives a document no score in [0, 1] or [0, 100].
    """
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
                answer=_answer(prompts, group),
                scores=_scores(prompts, group),
                tokens_seen=most.prompt_tokens,
                tokens_kept=most.kept_tokens,
                bytes_held=most.bytes_held,
                prefill_seconds=sum(cost.prefill_seconds for cost in own),
                total_seconds=sum(cost.total_seconds for cost in own),
            )
        )
    return found


def _answer(prompts: Prompts, requests: Sequence[Instance]) -> str:
    """Return the generated text after the task's filter, or the likeliest choice."""
    responses = [next(iter(request.filtered_resps.values())) for request in requests]
    if prompts.task.OUTPUT_TYPE == "generate_until":
        return str(responses[0])
    likeliest = max(range(len(requests)), key=lambda index: float(responses[index][0]))
    return str(requests[likeliest].args[1]).strip()


def _scores(prompts: Prompts, requests: Sequence[Instance]) -> dict[str, float]:
    """Return a document's scores by metric, the task's first metric first."""
    scores: dict[str, float] = {}
    filters = list(requests[0].filtered_resps)
    for each in filters:
        results = [request.filtered_resps[each] for request in requests]
        for metric, value in prompts.task.process_results(requests[0].doc, results).items():
            name = metric
            if metric.isdecimal():  # RULER names its metric after the prompt's length
                if metric != str(prompts.length):
                    continue
                name = "score"
            if isinstance(value, Real) and averages(prompts.task, metric):
                scores[name if len(filters) == 1 else f"{name},{each}"] = float(value)
    if not scores or not all(0 <= value <= 100 for value in scores.values()):
        raise ValueError(
            f"tasks must score every document, in [0, 1] or [0, 100], got {prompts.name} with "
            f"{scores or 'no such score'}"
        )
    return scores
