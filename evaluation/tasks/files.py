"""Read questions with their documents and answers from a file of JSON lines."""

import json
from pathlib import Path
from typing import Any, ClassVar

import attrs

from kvpolicy.checks import check_count
from kvpolicy.evaluation.asking import Asked, Asker
from kvpolicy.evaluation.tasks.question import Question
from kvpolicy.evaluation.tasks.task import Task
from kvpolicy.evaluation.texts import read_text

_RULE = '{"context": "...", "question": "...", "answer": "..."} or with "answers": ["...", "..."]'


@attrs.frozen
class Files(Task):
    """Questions from a UTF-8 file, each line of which is a JSON object; blank ones are skipped.

    It has the texts ``context`` and ``question``, and ``answer`` or several ``answers``, each of
    which counts as right where it is found in the generated text, of at most ``new_tokens``. With
    ``"plain": true`` the model continues context and question as one text, without a chat template
    or words around them; the answer then follows exactly so, with its own white space. Other fields
    are ignored.
    """

    name: ClassVar[str] = "files"
    file: Path
    new_tokens: int = 32

    def questions(self, tokenizer: Any, tokens: int, count: int, seed: int = 0) -> list[Asked]:
        """Return the first questions of the file, at most ``count``; nothing is drawn.

        A ValueError names the line that is wrong or too long.
        """
        check_count("count", count, minimum=1)
        asker, found = Asker(tokenizer), list[Asked]()
        for number, line in enumerate(read_text(self.file, "file").split("\n"), start=1):
            if len(found) == count:
                break
            if line.strip():
                found.append(self._asked(line, f"line {number} of {self.file}", asker, tokens))
        return found

    def _asked(self, line: str, where: str, asker: Asker, tokens: int) -> Asked:
        question = self._question(line, where)
        try:
            asked = asker.ask(question)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if asked.prompt_len > tokens:
            raise ValueError(
                f"{where} must be a prompt of at most {tokens:,} tokens, got {asked.prompt_len:,}; "
                "shorten it, or allow longer prompts"
            )
        return asked

    def _question(self, line: str, where: str) -> Question:
        rule = f"{where} must be a JSON object {_RULE}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{rule}, got {error.msg} at column {error.colno}") from None
        if not isinstance(entry, dict):
            raise ValueError(f"{rule}, got {type(entry).__name__}")
        answers = entry.get("answers", [entry.get("answer")])
        if not isinstance(answers, list) or not answers:
            raise ValueError(f"{rule}, got answers={answers!r}")
        texts = {"context": entry.get("context"), "question": entry.get("question")}
        for name, text in (*texts.items(), *(("an answer", each) for each in answers)):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{rule}, all texts and not blank, got {name} {text!r}")
        plain = entry.get("plain", False)
        if not isinstance(plain, bool):
            raise ValueError(f"{where} must have true or false as plain, got {plain!r}")
        return Question(
            document=texts["context"] or "",
            question=texts["question"] or "",
            answers=tuple(answers),
            kind=self.file.stem,
            new_tokens=self.new_tokens,
            one_line=False,
            plain=plain,
        )
