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
from kvpolicy.integrations.transformers import PolicyCache, ReadTogether, read_together
from kvpolicy.integrations.transformers.stacking import may_stack, stack
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import FullContext
from kvpolicy.policy import CachePolicy

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

FULL = "full context"
"""The name of full context where it is not among the policies."""
# Distributions that are compared at a time: Gemma's of 256 tokens would be a copy of 268 MB.
_ROWS = 32
# Logits of a batch of answers, which are held several times: 268 MB in float32.
_LOGITS = 2**26


@attrs.frozen
class Outcome:
    """What one policy did with one question.

    Args:
        policy: The policy's name.
        kind: The question's kind.
        text: The generated answer; empty if none was asked for.
        score: Of the generated answer, in [0, 1]; None if none was asked for.
        log_prob: Natural logarithm of the right answer's probability, all ``answer_len`` tokens.
        divergence: Kullback-Leibler divergence of the distribution of the next token from full
            context's, in nats, mean over the right answer's tokens.
        seen: Tokens that were read under the policy.
        kept: Tokens that a layer held afterwards, mean over layers and KV heads.
        held_bytes: Bytes of their keys and values; full context holds ``full_bytes``.
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

    A prompt is read once for all policies, as far as they read the same, and answered in a batch.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        tokenizer: Its tokenizer.
        asked: The questions, at least one, that fit into the model's positions.
        policies: By name; None is full context, which is measured also if it is not among them.
        later: False: a policy reads document and question, and knows the question when it chooses.
            True: it reads the document, and the question is appended to what it kept.
        progress: Told of every policy and question.

    Raises:
        ValueError: The questions are wrong, or a policy cannot be applied to the model.
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
        caches = read_together(model, torch.tensor([ids], device=model.device), ordered)
        reports = {name: cache.report().total for name, cache in caches.items()}
        reference: Tensor | None = None
        answers: dict[str, tuple[float, float, str]] = {}
        for names in _groups(caches, len(each.answer_ids)):
            logits = torch.cat([caches.logits[name] for name in names]).float()
            together = [caches.pop(name) for name in names]
            cache = stack(together) if len(names) > 1 else together[0]
            if later and each.question_ids:
                logits = append(model, cache, [each.question_ids] * len(names), last=True)[:, -1]
            rows, texts = _answers(model, tokenizer, cache, logits, each)
            reference = rows[0] if reference is None else reference
            for name, own, text in zip(names, rows, texts, strict=True):
                right = torch.tensor(each.answer_ids, device=own.device)[:, None]
                log_prob = float(own.gather(1, right).double().sum())
                answers[name] = log_prob, divergence(reference, own), text
        question = each.question
        for name in ordered:
            log_prob, far, text = answers[name]
            yield Outcome(
                policy=name,
                kind=question.kind,
                text=text,
                score=question.score(text, question.answers) if question.new_tokens else None,
                log_prob=log_prob,
                answer_len=len(each.answer_ids),
                divergence=far,
                seen=reports[name].seen,
                kept=reports[name].kept,
                held_bytes=reports[name].held_bytes,
                full_bytes=reports[name].full_bytes,
            )
            done += 1
            progress("questions", done, total)


def _groups(caches: ReadTogether, answer_len: int) -> list[list[str]]:
    """Return the names of caches whose answers are decoded as rows of one batch.

    The first, full context, is alone: to its length all others would be padded. The logits of the
    right answer's tokens limit a batch.
    """
    first, *others = caches
    most = max(_LOGITS // (answer_len * caches.logits[first].shape[-1]), 1)
    rows = [name for name in others if may_stack(caches[name])]
    batches = [rows[start : start + most] for start in range(0, len(rows), most)]
    return [[first], *batches, *([name] for name in others if name not in rows)]


def divergence(reference: Tensor, rows: Tensor) -> float:
    """Return the mean over the rows of ``sum(p * (log p - log q))``, in nats.

    It is the Kullback-Leibler divergence of what is compared, ``log q`` in ``rows``, from ``log p``
    in ``reference``: both ``[tokens, vocabulary]``, float32.

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
    model: PreTrainedModel, cache: Cache, ids: Sequence[Sequence[int]], *, last: bool = False
) -> Tensor:
    """Read ids into a cache; return the logits ``[batch, len, vocabulary]``, float32.

    A policy chooses in the first call; later ones append. If only the ``last`` token's logits are
    needed, ``len`` is 1 for models that can leave out the others.
    """
    tokens = torch.tensor(ids, device=model.device)
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": 1} if last and keeps else {}
    attached = cache.attached(model) if isinstance(cache, PolicyCache) else nullcontext()
    with torch.no_grad(), attached:
        logits: Tensor = model(tokens, **{CACHE: cache}, **keep).logits
    return logits.float()


def _answers(
    model: PreTrainedModel, tokenizer: Any, cache: PolicyCache, logits: Tensor, asked: Asked
) -> tuple[Tensor, list[str]]:
    """Return the probabilities of the right answer's tokens, and the greedy answers.

    The cache holds what comes before the answer, in one row or more; ``logits``, ``[batch,
    vocabulary]``, are of the answer's first token. The probabilities are logarithms ``[batch,
    answer_len, vocabulary]``, float32; the answers are texts, one for each row.
    """
    right, answered, rows = asked.answer_ids, copy.copy(cache), logits[:, None]
    if len(right) > 1:
        rows = torch.cat([rows, append(model, answered, [right[:-1]] * len(logits))], dim=1)
    rows, known = rows.log_softmax(2), rows.argmax(2)
    if cache.policy.decoding is not None or not all(it.is_croppable for it in cache.layers):
        return rows, _texts(model, tokenizer, cache, known[:, :1], asked)
    texts = [""] * len(known)
    agreed = (known == known.new_tensor(right)).cumprod(1).sum(1)
    for count in sorted({*agreed.tolist()}):
        alike = (agreed == count).nonzero()[:, 0]
        going = copy.copy(answered)
        going.batch_select_indices(alike)
        going.crop(min(count + 1, len(right)) - len(right))
        found = _texts(model, tokenizer, going, known[alike, : count + 1], asked)
        for row, text in zip(alike.tolist(), found, strict=True):
            texts[row] = text
    return rows, texts


def _texts(
    model: PreTrainedModel, tokenizer: Any, cache: PolicyCache, known: Tensor, asked: Asked
) -> list[str]:
    """Return greedy answers, up to an end token, a line's end, or the most tokens allowed.

    ``known``, ``[batch, known]``, are the answers' first tokens, at least one; the cache holds what
    comes before the answer, and all of them but the last.
    """
    ends, ids, texts = _ends(model, tokenizer), known.tolist(), [""] * len(known)
    going = rows = list(range(len(known)))  # whose answers go on; that the cache holds
    for index in range(asked.question.new_tokens):
        if index >= known.shape[1]:
            if 2 * len(going) <= len(rows):
                cache.batch_select_indices(torch.tensor([rows.index(row) for row in going]))
                rows = going
            said = append(model, cache, [ids[row][-1:] for row in rows])[:, -1].argmax(1)
            for row, token in zip(rows, said.tolist(), strict=True):
                ids[row].append(token)
        going = [row for row in going if ids[row][index] not in ends]
        for row in going:
            texts[row] = tokenizer.decode(ids[row][: index + 1], skip_special_tokens=True)
        if asked.question.one_line:
            going = [row for row in going if "\n" not in texts[row].lstrip()]
        if not going:
            break
    return texts


def _ends(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """Return the ids of the tokens that end an answer."""
    said = model.generation_config.eos_token_id
    several = said if isinstance(said, list) else [said]
    return {each for each in (*several, tokenizer.eos_token_id) if each is not None}
