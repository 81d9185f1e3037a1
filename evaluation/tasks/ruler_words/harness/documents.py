"""Make the word tasks' prompts as documents of the harness, and score the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpolicy.evaluation.tasks.ruler_words.task import prompts, score
from kvpolicy.evaluation.tasks.ruler_words.vocabulary import TOKEN_IDS

COUNT = 50
MADE_OF = {"prompts": "made by kvpolicy"}


def word_documents(
    kind: str,
    *,
    max_seq_lengths: Sequence[int] = (1024,),
    tokenizer: Any = None,
    limit: int | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Return the documents of a RULER-like task, for the harness to load.

    Args:
        kind: Of the questions.
        max_seq_lengths: Tokens of a prompt.
        tokenizer: Where it is given, it must be the bundled model's.
        limit: Documents of each length; None for 50.

    Raises:
        ValueError: A length is too small, or the tokenizer another one.
    """
    import datasets

    if tokenizer is not None and not isinstance(tokenizer, str):
        known = tokenizer.get_vocab()
        if not all(known.get(word) == token for word, token in TOKEN_IDS.items()):
            raise ValueError(
                "tokenizer must be that of the bundled model ruler_words for its tasks, got "
                "another one; for other models there are the harness's own tasks of RULER"
            )
    rows = [
        {
            "context": prompt.document,
            "question": prompt.question,
            "input": prompt.input,
            "outputs": list(prompt.outputs),
            "max_length": length,
        }
        for length in max_seq_lengths
        for prompt in prompts(kind, length, limit or COUNT, seed=0)
    ]
    return {"test": datasets.Dataset.from_list(rows)}


def string_match(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the fraction of the expected words that an answer contains."""
    return {"string_match": score(results[0], doc["outputs"])}


def _documents_of(kind: str) -> Callable[..., dict[str, Any]]:
    def documents(**metadata: Any) -> dict[str, Any]:
        return word_documents(kind, **metadata)

    documents.__doc__ = f"Documents of the kind {kind}; see `word_documents`."
    return documents


single = _documents_of("single")
multi_key = _documents_of("multi-key")
multi_query = _documents_of("multi-query")
two_hop = _documents_of("two-hop")
tracing = _documents_of("tracing")
common = _documents_of("common")
frequent = _documents_of("frequent")
