"""Generate greedy answers, with the question read before or after the policy has chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.evaluation.tasks.ruler_words import score
from kvpolicy.integrations.transformers import PolicyCache

# When the question is read: together with the document, or after the policy has chosen.
MODES = ("with", "later")


@torch.no_grad()
def continuations(
    model: PreTrainedModel,
    policy: CachePolicy,
    documents: Tensor,
    questions: Tensor,
    max_new_tokens: int,
    *,
    later: bool,
    chosen: Callable[[PolicyCache, Tensor], None] = lambda cache, first: None,
) -> Tensor:
    """Return greedy continuations of questions on documents, under a policy.

    Args:
        model: in evaluation mode.
        policy: what to keep, chosen once: after the document and question, or the document alone.
        documents: token ids ``[batch, document_len]``.
        questions: token ids ``[batch, question_len]``.
        max_new_tokens: tokens to generate.
        later: whether the question is read after the policy has chosen.
        chosen: called once the policy has chosen, with the cache and the tokens it has read.

    Returns:
        ``[batch, max_new_tokens]`` token ids; the caller has to cut off what follows an answer.
    """
    cache = PolicyCache(policy)
    with cache.attached(model):
        first = documents if later else torch.cat([documents, questions], dim=1)
        logits = model(first, cache=cache, logits_to_keep=1).logits
        chosen(cache, first)
        if later:
            logits = model(questions, cache=cache, logits_to_keep=1).logits
        tokens = [logits[:, -1:].argmax(dim=-1)]
        while len(tokens) < max_new_tokens:
            logits = model(tokens[-1], cache=cache).logits
            tokens.append(logits[:, -1:].argmax(dim=-1))
    return torch.cat(tokens, dim=1)


def word_score(tokenizer: Any, generated: Tensor | list[int], outputs: Sequence[str]) -> float:
    """Return the fraction of expected words in the generated text, up to the answer's end."""
    text, _, _ = tokenizer.decode(generated).partition(tokenizer.eos_token)
    return score(text, outputs)
