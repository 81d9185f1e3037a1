"""Make prompts with known answers: of the needle task, or from a file of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.evaluation.defaults import MIN_NEEDLE_CONTEXT
from kvpolicy.evaluation.readable import check_known, check_whole
from kvpolicy.evaluation.text_files import read_text


@attrs.frozen
class Prompt:
    """A prompt's token ids, with the start of a right answer.

    Args:
        input_ids: The prompt's tokens.
        answers: Token ids of the answer; several where a tokenizer can spell it in several ways.
        kind: What kind of question it is; every kind is scored by itself.
        decode: Turns tokens into text where the answer counts as text; None where tokens count.

    Example:
        >>> Prompt((1, 2), answers=((7, 8),)).is_match([7, 8, 9])
        True
    """

    input_ids: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    kind: str = "exact match"
    decode: Callable[[Sequence[int]], str] | None = attrs.field(default=None, repr=False)

    @property
    def max_new_tokens(self) -> int:
        """The number of tokens to generate, enough for every spelling of the answer."""
        return max(len(answer) for answer in self.answers)

    def is_match(self, generated: Sequence[int]) -> bool:
        """True if generated tokens start with a right answer.

        As many generated tokens as the answer has are compared: token by token, or, with
        ``decode``, as text without white space around it.
        """
        for answer in self.answers:
            head = tuple(generated[: len(answer)])
            if self.decode is None:
                if head == answer:
                    return True
            elif self.decode(head).strip() == self.decode(answer).strip():
                return True
        return False


def needle_prompts(context_len: int = 1024, count: int = 200, seed: int = 0) -> list[Prompt]:
    """Return prompts of the needle task, half of them one-hop and half two-hop.

    Args:
        context_len: Tokens of every prompt, at least 64; short ones hold fewer pairs.
        count: Number of prompts, at least 2; of an odd number the larger half is one-hop.
        seed: Of the draws. The two kinds share their contexts and differ in the question.

    Raises:
        ValueError: ``context_len`` or ``count`` is out of its range.
    """
    from kvpolicy.evaluation.tasks.needle import NeedleTask

    if context_len < MIN_NEEDLE_CONTEXT:
        raise ValueError(f"context must be at least {MIN_NEEDLE_CONTEXT} tokens, got {context_len}")
    if count < 2:
        raise ValueError(f"count must be at least 2, one prompt of each kind, got {count}")
    prompts = []
    for kind, hops, share in (("one-hop", 1, count - count // 2), ("two-hop", 2, count // 2)):
        task = NeedleTask(context_len=context_len, hops=hops, num_pairs=min(16, context_len // 16))
        prompts += [
            Prompt(tuple(drawn.input_ids), (tuple(drawn.answer),), kind)
            for drawn in task.prompts(share, seed)
        ]
    return prompts


def read_prompts(path: str | os.PathLike[str], tokenizer: Any) -> list[Prompt]:
    """Read prompts with answers from a file of JSON lines.

    The answer is matched exactly against the decoded continuation, white space around either not
    counted, over as many tokens as the answer has (spelled with a space before it, or without).

    Args:
        path: The file, UTF-8; blank lines are skipped.
        tokenizer: A tokenizer of Transformers.

    Raises:
        ValueError: The file cannot be read, has no prompt, or a line breaks the rule; the message
            names the line.
    """
    prompts = [
        _from_line(line, f"line {number} of {path}", tokenizer)
        for number, line in enumerate(read_text(Path(path), "prompts file").splitlines(), start=1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"prompts file {path} must hold at least one prompt, got none")
    return prompts


def _from_line(line: str, where: str, tokenizer: Any) -> Prompt:
    rule = f'{where} must be a JSON object {{"prompt": "...", "answer": "..."}}'
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{rule}, got invalid JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{rule}, got {type(entry).__name__}")
    for name in ("prompt", "answer"):
        value = entry.get(name)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{rule}, both texts and not blank, got {name}={value!r}")
    answer = entry["answer"].strip()
    spellings = (
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (answer, f" {answer}")
    )

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    check_whole(
        tokenizer, tokenizer.encode(answer, add_special_tokens=False), f"the answer in {where}"
    )
    ids = tokenizer.encode(entry["prompt"])
    check_known(tokenizer, ids, f"the prompt in {where}")
    return Prompt(tuple(ids), tuple(dict.fromkeys(spellings)), decode=decode)
