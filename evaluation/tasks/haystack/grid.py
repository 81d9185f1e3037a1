"""Make the haystack task's prompts, and score how much of the needle an answer repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.evaluation.tasks.harness_tasks.essays import read_essays, sentences_of

NEEDLE = (
    "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny "
    "day."
)
QUESTION = "What is the best thing to do in San Francisco?"
DEPTHS = tuple(percent / 100 for percent in range(0, 101, 10))
ANSWER_TOKENS = 64  # as in haystack.yaml
TEMPLATE_TOKENS = 64  # for the text that the task's template puts around context and question
MADE_OF = {"essays": "essays/*.txt", "sentences": "split by kvpolicy"}


@attrs.frozen
class Haystack:
    """A text of essays into which a needle sentence is inserted.

    Args:
        sentences: Of the essays.
        tokenizer: That of the model.
    """

    sentences: tuple[str, ...]
    tokenizer: Any

    def document(self, length: int, depth: float) -> dict[str, Any]:
        """Return essay text of a given length with the needle inserted at a given depth.

        Args:
            length: Tokens of prompt and answer together, at most.
            depth: Where the needle is, as the fraction of the sentences before it, in [0, 1].

        Raises:
            ValueError: The length leaves no room for a sentence, or there are too few essays.
        """
        room = length - ANSWER_TOKENS - TEMPLATE_TOKENS - self._count(f"{NEEDLE} {QUESTION}")
        chosen: list[str] = []
        used = 0
        for sentence in self.sentences:
            used += self._count(f" {sentence}")
            if used > room:
                break
            chosen.append(sentence)
        else:
            raise ValueError(
                f"data must hold essays of at least {length} tokens for the task haystack at that "
                f"length, got {used}; put more texts into its folder essays"
            )
        if not chosen:
            raise ValueError(
                f"lengths must leave room for a sentence around the needle, got {length}"
            )
        place = round(len(chosen) * depth)
        context = " ".join([*chosen[:place], NEEDLE, *chosen[place:]])
        return {
            "context": context,
            "question": QUESTION,
            "needle": NEEDLE,
            "depth": depth,
            "max_length": length,
        }

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def haystack_documents(
    *,
    max_seq_lengths: Sequence[int] = (4096,),
    tokenizer: Any = None,
    data: Path | str | None = None,
    limit: int | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Return the needle-in-a-haystack task's documents, for the harness to load.

    Args:
        max_seq_lengths: Lengths of the grid.
        tokenizer: A tokenizer or its name.
        data: A folder with ``essays/*.txt``.
        limit: Depths of the grid, spread over all; None for all.

    Raises:
        ValueError: There is no tokenizer or no data; see `Haystack.document`.
    """
    import datasets

    from kvpolicy.evaluation.tasks.harness_tasks.documents import as_tokenizer

    if tokenizer is None or data is None:
        raise ValueError(
            "the task haystack needs a tokenizer and data, a folder with essays/*.txt; give them "
            "to the harness's own command as --metadata tokenizer=NAME data=DIR"
        )
    sentences = tuple(sentences_of(read_essays(Path(data))))
    haystack = Haystack(sentences, as_tokenizer(tokenizer))
    rows = [
        haystack.document(length, depth)
        for length in max_seq_lengths
        for depth in spread(DEPTHS, limit)
    ]
    return {"test": datasets.Dataset.from_list(rows)}


def spread(values: Sequence[float], count: int | None) -> list[float]:
    """Return evenly spaced items of a sequence, with the first and the last.

    Example:
        >>> spread((0, 10, 20, 30, 40), 3)
        [0, 20, 40]
    """
    if count is None or count >= len(values):
        return list(values)
    last = len(values) - 1
    return [values[round(at * last / max(count - 1, 1))] for at in range(count)]


def rouge_1(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the ROUGE-1 F measure, in [0, 1], of an answer against the needle.

    Example:
        >>> round(rouge_1({"needle": "one two three four"}, ["three, and four!"])["rouge1"], 3)
        0.571
    """
    from rouge_score.rouge_scorer import RougeScorer

    score = RougeScorer(["rouge1"]).score(doc["needle"], results[0])["rouge1"]
    return {"rouge1": float(score.fmeasure)}
