"""`PolicyLM`: a Hugging Face model of lm-evaluation-harness that reads prompts under a policy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, cast

from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers import LogitsProcessorList, PreTrainedModel

from kvpolicy.integrations.lm_eval.chosen import check_model_arguments, chosen_policy
from kvpolicy.integrations.lm_eval.costs import PrefillClock, RequestCosts
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policy import CachePolicy

Question = Literal["with", "later"]
QUESTIONS = ("with", "later")


@register_model("kvpolicy")
class PolicyLM(HFLM):  # type: ignore[misc]
    """A model of the harness whose prompts are read under a policy, a fresh cache for every batch.

    Args:
        pretrained: A name, a folder or a loaded model, as `HFLM` takes them.
        tokenizer: A name, a folder or a tokenizer; that of the model, if None.
        policy: A policy, or a registered name; its parameters are given beside it. None: a
            composition where parts are named, else the full context.
        scorer: A composition's scorer, such as ``"last_query"``.
        selector: Its selector.
        propagation: Its propagation policy.
        question: ``"with"``: the policy sees the whole prompt. ``"later"``: it sees the document
            alone, and the question is read after it has chosen; see `register_splitter`.
        arguments: Parameters of the policy, and what else `HFLM` takes.

    Attributes:
        policy: The policy.
        question: As above.
        last_costs: What each request of the last `generate_until` or `loglikelihood` cost, in the
            order of the requests.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike[str] | PreTrainedModel,
        tokenizer: Any = None,
        policy: CachePolicy | str | None = None,
        scorer: str | None = None,
        selector: str | None = None,
        propagation: str | None = None,
        question: Question = "with",
        **arguments: Any,
    ) -> None:
        if question not in QUESTIONS:
            raise ValueError(f"question must be one of {', '.join(QUESTIONS)}, got {question!r}")
        parts = {"scorer": scorer, "selector": selector, "propagation": propagation}
        self.policy, rest = chosen_policy(policy, parts, arguments)
        self.question: Question = question
        self.last_costs: list[RequestCosts] = []
        loaded = isinstance(pretrained, PreTrainedModel)
        check_model_arguments(rest, loaded=loaded)
        if rest.get("device", "") is None:
            del rest["device"]
        if not loaded:
            pretrained = os.fspath(cast("str", pretrained))
        super().__init__(pretrained, tokenizer=tokenizer, **rest)
        self._batch: Sequence[Instance] = ()
        self._batch_costs: list[RequestCosts] = []

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate answers, as `HFLM` does, under the policy."""
        answers: list[str] = [""] * len(requests)
        costs: list[Any] = [None] * len(requests)
        progress = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0)
        for batch in self._batches(requests):
            self._batch = [requests[index] for index in batch]
            found = super().generate_until(list(self._batch), disable_tqdm=True)
            for index, answer, cost in zip(batch, found, self._batch_costs, strict=True):
                answers[index], costs[index] = answer, cost
            progress.update(len(batch))
        progress.close()
        self.last_costs = costs
        return answers

    def _batches(self, requests: Sequence[Instance]) -> list[list[int]]:
        """Indices of requests that are generated together, in the order in which `HFLM` puts them.

        A batch is one of its own chunks, so that its row ``i`` is the batch's request ``i``.
        """
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        size, batches = int(self.batch_size), []
        for group in groups.values():
            lengths = {index: len(self.tok_encode(requests[index].args[0])) for index in group}
            group.sort(key=lambda index: (-lengths[index], requests[index].args[0]))
            batches += [group[start : start + size] for start in range(0, len(group), size)]
        return batches

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        cache = PolicyCache(self.policy)
        clock = PrefillClock(cache)
        output: Tensor = super()._model_generate(
            context,
            max_length,
            stop,
            past_key_values=cache,
            logits_processor=LogitsProcessorList([clock]),
            **generation_kwargs,
        )
        self._batch_costs = clock.costs()
        return output
