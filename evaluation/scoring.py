"""Score policies on questions: answers, the probability of the right answer, and what it costs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from kvpolicy.evaluation.asking import Asked, check_fits
from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.integrations.transformers import PolicyCache, read_together
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import FullContext
from kvpolicy.policy import CachePolicy

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

FULL = "full context"
"""The name of full context where it is not among the policies."""
# Distributions that are compared at a time: Gemma's of 256 tokens would be a copy of 268 MB.
_ROWS = 32


@attrs.frozen
class Outcome:
    """What one policy did with one question.

    Args:
        policy: The policy's name.
        kind: The question's kind.
        text: The generated answer; empty if none was asked for.
        score: Of the generated answer, in [0, 1]; None if none was asked for.
        log_prob: Natural logarithm of the probability of the right answer, all its tokens together.
        answer_len: Tokens of the right answer.
        divergence: Kullback-Leibler divergence of the distribution of the next token from full
            context's, in nats, mean over the right answer's tokens.
        seen: Tokens that were read under the policy.
        kept: Tokens that a layer held afterwards, mean over layers and KV heads.
        held_bytes: Bytes of their keys and values.
        full_bytes: Bytes that full context holds.
    """

    policy: str
    kind: str
    text: str
    score: float | None
    log_prob: float
    answer_len: int
    divergence: float
    seen: int
    kept: float
    held_bytes: int
    full_bytes: int


@torch.no_grad()
def outcomes(
    model: PreTrainedModel,
    tokenizer: Any,
    asked: Sequence[Asked],
    policies: Mapping[str, CachePolicy | None],
    *,
    later: bool = False,
    progress: Progress = silent,
) -> Iterator[Outcome]:
    """Yield what each policy does with each question; full context is the first of each.

    A prompt is read once for all policies, as far as they read the same.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        tokenizer: Its tokenizer.
        asked: The questions, at least one.
        policies: By name; None is full context, which is measured also if it is not among them.
        later: False: a policy reads document and question, and knows the question when it chooses.
            True: it reads the document, and the question is appended to what it kept.
        progress: Told of every policy and question.

    Raises:
        ValueError: There are no questions, one does not fit into the model's positions, or a policy
            cannot be applied to the model.
    """
    check_fits(model, asked)
    full = next((name for name, policy in policies.items() if policy is None), FULL)
    ordered = {full: FullContext()} | {
        name: policy for name, policy in policies.items() if policy is not None
    }
    done, total = 0, len(asked) * len(ordered)
    progress("questions", done, total)
    for each in asked:
        ids = each.document_ids + (() if later else each.question_ids)
        reference: Tensor | None = None
        caches = read_together(model, torch.tensor([ids], device=model.device), ordered)
        for name in ordered:
            cache, logits = caches.pop(name), caches.logits[name][0].float()
            report = cache.report().total  # before anything is appended
            if later and each.question_ids:
                logits = append(model, cache, each.question_ids, last=True)[-1]
            question, right = each.question, torch.tensor(each.answer_ids, device=logits.device)
            answered = copy.copy(cache)
            rows = _rows(model, answered, logits, each.answer_ids)
            reference = rows if reference is None else reference
            agreed = int((rows.argmax(1) == right).cumprod(0).sum())
            if cache.policy.decoding is None and all(it.is_croppable for it in cache.layers):
                answered.crop(min(agreed + 1, len(right)) - len(right))
                text = _answer(model, tokenizer, answered, rows[: agreed + 1], each)
            else:
                text = _answer(model, tokenizer, cache, rows[:1], each)
            yield Outcome(
                policy=name,
                kind=question.kind,
                text=text,
                score=question.score(text, question.answers) if question.new_tokens else None,
                log_prob=float(rows.gather(1, right[:, None]).double().sum()),
                answer_len=len(each.answer_ids),
                divergence=divergence(reference, rows),
                seen=report.seen,
                kept=report.kept,
                held_bytes=report.held_bytes,
                full_bytes=report.full_bytes,
            )
            done += 1
            progress("questions", done, total)


def divergence(reference: Tensor, rows: Tensor) -> float:
    """Return the mean Kullback-Leibler divergence of distributions from others, in nats.

    ``mean over rows of sum over the vocabulary of p (log p - log q)``, with ``log p`` in
    ``reference`` and ``log q`` in ``rows``.

    Args:
        reference: ``[tokens, vocabulary]`` logarithms of probabilities, float32.
        rows: The same of what is compared.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
        >>> round(divergence(p.log(), q.log()), 4), divergence(p.log(), p.log())
        (0.1438, 0.0)
    """
    total = 0.0
    for start in range(0, len(rows), _ROWS):
        own, full = rows[start : start + _ROWS], reference[start : start + _ROWS]
        each = torch.nn.functional.kl_div(own, full, reduction="none", log_target=True)
        total += float(each.sum(1).clamp(min=0).double().sum())
    return total / len(rows)


def append(
    model: PreTrainedModel, cache: Cache, ids: Sequence[int], *, last: bool = False
) -> Tensor:
    """Read ids into a cache and return the logits of all, or of the last ``[len, vocabulary]``.

    A policy chooses in the first call; later ones append.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        cache: Ours, or one of Transformers.
        ids: Token ids, at least one.
        last: Whether only the last token's logits are needed.
    """
    tokens = torch.tensor([ids], device=model.device)
    keep = {"logits_to_keep": 1} if last and _keeps(model) else {}
    attached = cache.attached(model) if isinstance(cache, PolicyCache) else nullcontext()
    with torch.no_grad(), attached:
        logits: Tensor = model(tokens, **{CACHE: cache}, **keep).logits[0]
    return logits.float()


def _keeps(model: PreTrainedModel) -> bool:
    """True if a model can leave out the logits of all tokens but the last."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _rows(
    model: PreTrainedModel, cache: PolicyCache, logits: Tensor, answer: Sequence[int]
) -> Tensor:
    """Return the logarithms of the next token's probabilities at each token of an answer.

    Args:
        model: The model.
        cache: What comes before the answer; the answer is appended to it.
        logits: ``[vocabulary]`` for the answer's first token.
        answer: Token ids of the answer.

    Returns:
        ``[answer_len, vocabulary]`` float32.
    """
    rows = logits[None]
    if len(answer) > 1:
        rows = torch.cat([rows, append(model, cache, answer[:-1])])
    return rows.log_softmax(1)


def _answer(
    model: PreTrainedModel, tokenizer: Any, cache: PolicyCache, rows: Tensor, asked: Asked
) -> str:
    """Return the greedy answer, up to an end token, a line's end, or the most tokens allowed.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        cache: What comes before the answer, and all tokens that are known but the last.
        rows: ``[known, vocabulary]`` for the answer's first tokens, at least one.
        asked: The question.
    """
    ends, ids, text = _ends(model, tokenizer), list[int](), ""
    known = rows.argmax(1).tolist()
    for index in range(asked.question.new_tokens):
        if index == len(known):
            known.append(int(append(model, cache, [ids[-1]])[-1].argmax()))
        if known[index] in ends:
            break
        ids.append(known[index])
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if asked.question.one_line and "\n" in text.lstrip():
            break
    return text


def _ends(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """Return the ids of the tokens that end an answer."""
    said = model.generation_config.eos_token_id
    several = said if isinstance(said, list) else [said]
    return {each for each in (*several, tokenizer.eos_token_id) if each is not None}
