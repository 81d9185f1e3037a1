"""Define `PolicyLM`, a Hugging Face model of lm-evaluation-harness that applies a policy."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers import LogitsProcessorList, PreTrainedModel

from kvpolicy.integrations.lm_eval.chosen import check_model_arguments, chosen_policy
from kvpolicy.integrations.lm_eval.costs import PrefillClock, RequestCosts
from kvpolicy.integrations.lm_eval.scoring import CacheScorer, Continuation
from kvpolicy.integrations.lm_eval.splitters import document_end
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.document import beams_of, left_padded, read
from kvpolicy.integrations.transformers.forward.facts import keeps_everything
from kvpolicy.policy import CachePolicy

Question = Literal["with", "later"]
QUESTIONS = ("with", "later")


@register_model("kvpolicy")
class PolicyLM(HFLM):  # type: ignore[misc]
    """A language model for lm-evaluation-harness that reads every prompt under a policy.

    Every batch gets a new cache.

    Args:
        pretrained: A name, a folder or a loaded model, as `HFLM` takes them.
        tokenizer: A name, a folder or a tokenizer; None takes the model's own.
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
        if rest.get("device") is None:  # `HFLM` assumes a GPU if no device is given
            rest["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        if not loaded:
            pretrained = os.fspath(cast("str", pretrained))
        processes = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun says
        if processes > 1 and torch.device(rest["device"]).type == "cpu":
            # Without this, Accelerate treats each process as the only one, or uses a GPU if there
            # is one.
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        super().__init__(pretrained, tokenizer=tokenizer, **rest)
        self._take_share()
        self._batch: Sequence[Instance] = ()
        self._batch_costs: list[RequestCosts] = []

    def get_model_info(self) -> dict[str, Any]:
        """Return `HFLM`'s description of the model, with the policy and the question mode added."""
        return {**super().get_model_info(), "policy": str(self.policy), "question": self.question}

    def _take_share(self) -> None:
        """Choose the requests that this process answers, if `HFLM` does not.

        `HFLM` shares the requests only between GPUs; several processes on CPUs would all do the
        same work.
        """
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None and self.world_size == 1:
            self._rank = accelerator.process_index
            self._world_size = accelerator.num_processes

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate answers as `HFLM` does, with prompts read under the policy."""
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
        """Group requests into batches, as lists of indices in the order that `HFLM` uses.

        Each batch is exactly one chunk of `HFLM`, so that its row ``i`` is the batch's request
        ``i``.
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
        width = context.shape[1]
        appending: AbstractContextManager[Any] = nullcontext()
        if self.question == "later":
            mask = generation_kwargs.pop("attention_mask")
            context, mask = self._read_documents(cache, context, mask)
            generation_kwargs["attention_mask"] = mask
            cache.batch_repeat_interleave(beams_of(self.model, generation_kwargs))
            appending = cache.appending()
        added = context.shape[1] - width  # padding between documents and questions
        with appending:
            output: Tensor = super()._model_generate(
                context,
                max_length + added,
                stop,
                cache=cache,
                logits_processor=LogitsProcessorList([clock]),
                **generation_kwargs,
            )
        self._batch_costs = clock.costs(len(self._batch))
        return output[:, added:]

    def _read_documents(
        self, cache: PolicyCache, context: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read the batch's documents into the cache; return the prompts padded anew.

        A row of ``context`` and ``mask``, ``[batch, len]``, is a prompt, padded and truncated on
        the left. A returned row is the padded document followed by the padded question.
        """
        documents, questions = [], []
        for request, row, real in zip(self._batch, context, mask.bool(), strict=True):
            ids = row[real].tolist()
            end = len(ids) - self._question_len(request)
            if end < 1:
                raise ValueError(
                    f"max_length must leave room for the document before the question and the "
                    f"answer, got {self.max_length}: a question of the task {request.task_name!r} "
                    f"has {len(ids) - end} tokens, its prompt {len(ids)} after truncation"
                )
            documents.append(ids[:end])
            questions.append(ids[end:])
        pad = self.tokenizer.pad_token_id
        read_ids, read_mask = left_padded(documents, pad, context.device)
        asked_ids, asked_mask = left_padded(questions, pad, context.device)
        with self._precision():
            read(self.model, cache, read_ids, read_mask)
        return torch.cat([read_ids, asked_ids], 1), torch.cat([read_mask, asked_mask], 1)

    def _question_len(self, request: Instance) -> int:
        """Count the tokens of a request's prompt that come after its document."""
        prompt = request.args[0]
        end = document_end(request.task_name, request.doc, prompt)
        whole, document = (
            self.tok_batch_encode([text], truncation=self.truncation)[0][0].tolist()
            for text in (prompt, prompt[:end])
        )
        return max(len(whole) - common_prefix_len(whole, document), 1)

    def _precision(self) -> AbstractContextManager[Any]:
        """Return the autocast context in which `HFLM` runs the model."""
        return torch.autocast(
            device_type=self.device.type,
            dtype=self.mixed_precision_dtype,
            enabled=self.mixed_precision_dtype is not None,
        )

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Score continuations by log-likelihood, with contexts read under the policy."""
        self._batch = requests
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts as `HFLM` does, if the policy keeps every token.

        Raises:
            ValueError: The policy evicts or drops tokens. Every token of a text is scored while the
                text is read, so that a policy that evicts would have no effect.
        """
        if not keeps_everything(self.policy, self.model.config.get_text_config().num_hidden_layers):
            raise ValueError(
                f"loglikelihood_rolling needs a policy that keeps everything, got {self.policy}: a "
                "text's own tokens are scored while it is read, before anything is evicted; use "
                "tasks with contexts and continuations (loglikelihood, multiple_choice)"
            )
        found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        if any(texts is None for texts, _, _ in requests):  # windows of a rolling text
            return self._plain(requests, disable_tqdm, override_bs)
        continuations = [
            Continuation.of(context, scored, self._document_len(index, context), self.max_length)
            for index, (_, context, scored) in enumerate(requests)
        ]
        found: list[Any] = [None] * len(requests)
        costs: list[Any] = [RequestCosts(1, 0.0, 0, 0.0, 0.0)] * len(requests)
        # A context of one token, such as the context of an empty text: there is nothing to evict.
        alone = [index for index, each in enumerate(continuations) if not each.document]
        if alone:
            plain = self._plain([requests[index] for index in alone], True, override_bs)
            for index, result in zip(alone, plain, strict=True):
                found[index] = result
        scorer = CacheScorer(
            self.model,
            self.policy,
            int(self.batch_size),
            self.tokenizer.pad_token_id,
            self.softmax_dtype,
        )
        progress = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0)
        with self._precision():
            for scores in scorer.score({i: c for i, c in enumerate(continuations) if c.document}):
                for index, score in scores.items():
                    found[index] = (score.log_likelihood, score.is_greedy)
                    costs[index] = score.costs
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], found[index])
                progress.update(len(scores))
        progress.close()
        self.last_costs = costs
        return found

    def _plain(
        self, requests: list[Any], disable_tqdm: bool, override_bs: int | None
    ) -> list[tuple[float, bool]]:
        """Score requests as `HFLM` does, in one forward without a policy."""
        found: list[tuple[float, bool]] = super()._loglikelihood_tokens(
            requests, disable_tqdm=disable_tqdm, override_bs=override_bs
        )
        return found

    def _document_len(self, index: int, context: Sequence[int]) -> int | None:
        """Count a request's document tokens; None if the policy acts on the whole context."""
        if self.question == "with" or len(context) == 1:
            return None
        request = self._batch[index]
        prompt = request.args[0]
        end = document_end(request.task_name, request.doc, prompt)
        return common_prefix_len(context, self.tok_encode(prompt[:end]))


def common_prefix_len(ids: Sequence[int], others: Sequence[int]) -> int:
    """Count how many ids two sequences have in common at their start.

    Example:
        >>> common_prefix_len([1, 2, 3, 4], [1, 2, 5])
        2
    """
    unlike = (at for at, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other)
    return next(unlike, min(len(ids), len(others)))
