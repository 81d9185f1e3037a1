"""Make documents of the harness from prompts with long answers, and score the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicy.evaluation.defaults import MIN_NEEDLE_CONTEXT

from .task import LongAnswerTask, right_steps
from .vocabulary import token_names

COUNT = 50
MADE_OF = {"prompts": "made by kvpolicy"}
_QUESTION_TOKENS = 3


def loop(**metadata: Any) -> dict[str, Any]:
    """Return the documents of the task ``long_answers_loop``, for the harness to load."""
    return long_documents("loop", **metadata)


def chain(**metadata: Any) -> dict[str, Any]:
    """Return the documents of the task ``long_answers_chain``, for the harness to load."""
    return long_documents("chain", **metadata)


def long_documents(
    kind: str,
    *,
    max_seq_lengths: Sequence[int] = (256,),
    tokenizer: Any = None,
    limit: int | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Return a long-answer task's documents, for the harness to load.

    Args:
        kind: ``"loop"`` or ``"chain"``.
        max_seq_lengths: Tokens of a prompt, its answer not counted.
        tokenizer: Where it is given, it must be the bundled model's.
        limit: Documents of each length; None for 50.

    Raises:
        ValueError: A length is too small, or the tokenizer another one.
    """
    import datasets

    names = token_names()
    if tokenizer is not None and not isinstance(tokenizer, str):
        known = tokenizer.get_vocab()
        if not all(known.get(name) == index for index, name in enumerate(names)):
            raise ValueError(
                "tokenizer must be that of the bundled model long_answers for its tasks, got "
                "another one"
            )
    rows = []
    for length in max_seq_lengths:
        if length < MIN_NEEDLE_CONTEXT:
            raise ValueError(f"lengths must be at least {MIN_NEEDLE_CONTEXT} tokens, got {length}")
        for prompt in LongAnswerTask(kind, length).prompts(limit or COUNT):
            words = [names[token] for token in prompt.input_ids]
            rows.append(
                {
                    "context": " ".join(words[:-_QUESTION_TOKENS]),
                    "question": " ".join(words[-_QUESTION_TOKENS:]),
                    "answer": " ".join(names[token] for token in prompt.answer),
                    "max_length": length,
                }
            )
    return {"test": datasets.Dataset.from_list(rows)}


def scores(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return an answer's share of steps before the first wrong one, and whether all are right."""
    share = right_steps(results[0].split(), doc["answer"].split())
    return {"right_steps": share, "exact_match": float(share == 1.0)}
