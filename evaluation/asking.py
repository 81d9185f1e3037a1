"""Turn questions about documents into token ids, for any tokenizer.

A prompt is the ids of a document, and after them those of the question. Every text is encoded by
itself, so that the document's ids are the same whatever is asked, and no token crosses a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.evaluation.tasks.question import Question

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# In place of a document, to find where the chat template puts it.
_MARK = "Document-of-kvpolicy"


@attrs.frozen
class Asked:
    """A question as token ids.

    Args:
        question: The question.
        document_ids: Special tokens and the beginning of a chat template, then the document.
        question_ids: The question, the end of a chat template, and the reply's beginning.
        answer_ids: The answer whose probability is measured, at least one token.
    """

    question: Question = attrs.field(repr=False)
    document_ids: tuple[int, ...] = attrs.field(repr=False)
    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def prompt_len(self) -> int:
        """Number of tokens of document and question."""
        return len(self.document_ids) + len(self.question_ids)

    @property
    def total_len(self) -> int:
        """Number of tokens of the prompt with its answer, the longer of right and generated."""
        return self.prompt_len + max(len(self.answer_ids), self.question.new_tokens)


class Asker:
    """Turns questions into token ids, by a tokenizer's chat template if it has one.

    With a chat template, document, blank line and question are a user's message; a template that
    changes a message's text, or repeats it, is a ValueError. Without one the question is asked in
    the form ``Question: ... Answer:``, which untuned models understand. The tokenizer needs no
    special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._chat: tuple[str, str] | None = None
        if getattr(tokenizer, "chat_template", None):
            # Templates of thinking models know this option; others ignore it.
            text: str = tokenizer.apply_chat_template(
                [{"role": "user", "content": _MARK}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
            )
            before, *after = text.split(_MARK)
            if len(after) != 1:
                raise ValueError(
                    "the chat template must contain a user's message once and unchanged, got "
                    f"{text!r}"
                )
            self._chat = before, after[0]

    def ask(self, question: Question) -> Asked:
        """Return a question as token ids.

        It is a ValueError if the tokenizer makes no token of the document or of the answer, or
        knows no word of it.
        """
        from kvpolicy.evaluation.readable import check_known, check_whole

        own = self._ids(question.document)
        check_known(self._tokenizer, own, "the document")
        if question.plain:
            document = self._special(question.document, own) + own
            asked = self._ids(question.question)
        elif self._chat is not None:
            before, after = self._chat
            document = self._ids(before) + own
            asked = self._ids(f"\n\n{question.question}") + self._ids(after)
            asked += self._ids(question.prefix)
        else:
            document = self._special(question.document, own) + own
            end = f"Answer: {question.prefix}" if question.prefix else "Answer:"
            asked = self._ids(f"\n\nQuestion: {question.question}\n{end}")
        expected = self._ids(self._follows(question))
        check_whole(self._tokenizer, expected, "the answer")
        expected = expected[: question.expected_tokens]
        return Asked(question, tuple(document), tuple(asked), tuple(expected))

    def _follows(self, question: Question) -> str:
        """Return the text of the expected answer with the space before it, if there is one."""
        if question.plain or question.prefix:
            return question.expected
        return question.expected.strip() if self._chat else f" {question.expected.strip()}"

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _special(self, text: str, own: list[int]) -> list[int]:
        """Return the special tokens that the tokenizer puts before a text with these ids."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        starts = (at for at in range(len(ids) - len(own) + 1) if ids[at : at + len(own)] == own)
        return ids[: next(starts, 0)]


def check_fits(model: PreTrainedModel, asked: Sequence[Asked]) -> None:
    """Raise ValueError, before anything is computed, unless questions fit a model's positions."""
    from kvpolicy.evaluation.readable import positions_of

    if not asked:
        raise ValueError("questions must be at least one, got none")
    longest, limit = max(asked, key=lambda each: each.total_len), positions_of(model)
    if limit is not None and longest.total_len > limit:
        raise ValueError(
            f"prompts must fit into the model's {limit:,} positions, got one of "
            f"{longest.prompt_len:,} tokens and an answer of up to "
            f"{longest.total_len - longest.prompt_len:,}; give shorter prompts or another model"
        )
