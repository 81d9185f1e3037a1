"""Find the character of a task's prompt at which its document ends and its question begins."""

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

Splitter = Callable[[Mapping[str, Any], str], int]

_splitters: dict[str, Splitter] = {}


def register_splitter(pattern: str, splitter: Splitter) -> None:
    """Register a function that finds where the document ends in a task's prompts.

    Args:
        pattern: A task's name, or a pattern such as ``"longbench_*"``. A pattern registered later
            takes precedence.
        splitter: A function of the task's document (its fields by name) and of the whole prompt,
            which may include a chat template around the document. It returns how many characters of
            the prompt come before the question.

    Example:
        >>> register_splitter("my_task", lambda doc, prompt: prompt.rindex(doc["question"]))
    """
    _splitters.pop(pattern, None)
    _splitters[pattern] = splitter


def document_end(task: str | None, doc: Mapping[str, Any], prompt: str) -> int:
    """Return at which character of a prompt its document ends, by the task's splitter."""
    matching = [each for each in _splitters if fnmatch.fnmatchcase(task or "", each)]
    if not matching:
        raise ValueError(
            f"question must be 'with' for the task {task!r}, got 'later': no splitter tells where "
            "its prompts end their document and ask their question; register one, which returns "
            "how many characters come before the question, with "
            f"kvpolicy.integrations.lm_eval.register_splitter({task!r}, lambda doc, prompt: ...); "
            f"its documents have the fields {', '.join(doc)}"
        )
    pattern = matching[-1]
    try:
        end = _splitters[pattern](doc, prompt)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"the splitter {pattern!r} must find the document in a prompt of the task {task!r}, "
            f"got {type(error).__name__}: {error}; the document has the fields {', '.join(doc)}"
        ) from error
    if not 0 < end <= len(prompt):
        raise ValueError(
            f"the splitter {pattern!r} must return a number of characters in [1, {len(prompt)}], "
            f"the prompt's length, got {end}"
        )
    return end


def after_field(name: str) -> Splitter:
    """Return a splitter that ends the document after its field ``name`` in the prompt."""

    def split(doc: Mapping[str, Any], prompt: str) -> int:
        text = str(doc[name]).strip()  # a chat template may strip the ends of a message
        return prompt.rindex(text) + len(text)

    return split


def before_last_line(name: str) -> Splitter:
    """Return a splitter that ends the document before the last line of its field ``name``."""

    def split(doc: Mapping[str, Any], prompt: str) -> int:
        text = str(doc[name]).strip()
        return prompt.rindex(text) + text.rindex("\n") + 1

    return split


for _pattern in ("niah_*", "ruler_*"):  # the last sentence, on a line of its own, is the question
    register_splitter(_pattern, before_last_line("input"))
register_splitter("longbench_*", after_field("context"))
