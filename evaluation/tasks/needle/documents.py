"""Make needle questions as documents of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpolicy.evaluation.defaults import MIN_NEEDLE_CONTEXT

from .task import NeedleTask
from .vocabulary import token_names

COUNT = 100
MADE_OF = {"prompts": "made by kvpolicy"}


def one_hop(**metadata: Any) -> dict[str, Any]:
    """Return the documents of the task ``needle_one_hop``, for the harness to load."""
    return needle_documents(1, **metadata)


def two_hop(**metadata: Any) -> dict[str, Any]:
    """Return the documents of the task ``needle_two_hop``, for the harness to load."""
    return needle_documents(2, **metadata)


def needle_documents(
    hops: int,
    *,
    max_seq_lengths: Sequence[int] = (1024,),
    tokenizer: Any = None,
    limit: int | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Return a needle task's documents, for the harness to load.

    Args:
        hops: 1 or 2.
        max_seq_lengths: Tokens of a prompt.
        tokenizer: Where it is given, it must be the bundled model's.
        limit: Documents of each length; None for 100.

    Raises:
        ValueError: A length is too small, or the tokenizer another one.
    """
    import datasets

    names = token_names()
    if tokenizer is not None and not isinstance(tokenizer, str):
        known = tokenizer.get_vocab()
        if not all(known.get(name) == index for index, name in enumerate(names)):
            raise ValueError(
                "tokenizer must be the bundled model's for the needle tasks, whose language it "
                "alone reads, got another one"
            )
    rows = []
    for length in max_seq_lengths:
        if length < MIN_NEEDLE_CONTEXT:
            raise ValueError(f"lengths must be at least {MIN_NEEDLE_CONTEXT} tokens, got {length}")
        task = NeedleTask(context_len=length, hops=hops, num_pairs=min(16, length // 16))
        for prompt in task.prompts(limit or COUNT):
            words = [names[token] for token in prompt.input_ids]
            rows.append(
                {
                    "context": " ".join(words[:-2]),
                    "question": " ".join(words[-2:]),
                    "answer": " ".join(names[token] for token in prompt.answer),
                    "depth": prompt.depth,
                    "max_length": length,
                }
            )
    return {"test": datasets.Dataset.from_list(rows)}
