"""Questions of eight kinds, each with an answer and the words that count."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from .sentences import Words

KINDS = (
    "single", "multi-key", "multi-value", "multi-query", "two-hop", "tracing", "common", "frequent",
)  # fmt: skip


@attrs.frozen
class Question:
    """A question, and what a right answer looks like.

    Attributes:
        words: the question.
        answer: a right continuation of it, the closing ``<end>`` included.
        allowed: for each word of ``answer`` those that are right in its place; several where an
            answer may be given in any order.
        outputs: the words that a right continuation holds.
    """

    words: Words
    answer: Words
    allowed: tuple[Words, ...]
    outputs: Words


def ask_names(pairs: Sequence[tuple[Words, Words]]) -> Question:
    """Ask for the only names of one or more keys, in their order.

    Args:
        pairs: the keys, of one or two words, with their names.

    Example:
        >>> question = ask_names([(("river",), ("amber", "fox")), (("mill",), ("blue", "moon"))])
        >>> " ".join(question.words), " ".join(question.answer)
        ('name river and mill :', 'river amber fox , mill blue moon <end>')
    """
    keys = [key for key, _ in pairs]
    listed = [word for key in keys[:-2] for word in (*key, ",")]
    listed += [word for key in keys[-2:-1] for word in (*key, "and")]
    answer = _joined([key + name for key, name in pairs])
    outputs = tuple(word for _, name in pairs for word in name)
    return Question(
        ("name", *listed, *keys[-1], ":"), answer, tuple((word,) for word in answer), outputs
    )


def ask_all_names(key: Words, names: Sequence[Words]) -> Question:
    """Ask for all names of one key, in any order.

    Example:
        >>> question = ask_all_names(("river",), [("amber", "fox"), ("blue", "moon")])
        >>> " ".join(question.words), " ".join(question.answer)
        ('name all of river :', 'river amber fox , river blue moon <end>')
        >>> question.allowed[1], question.allowed[5]
        (('amber', 'blue'), ('blue',))
    """
    answer = _joined([key + name for name in names])
    allowed = [(word,) for word in answer]
    step = len(key) + len(names[0]) + 1
    for number in range(len(names)):
        allowed[len(key) + number * step] = tuple(name[0] for name in names[number:])
    outputs = tuple(word for name in names for word in name)
    return Question(("name", "all", "of", *key, ":"), answer, tuple(allowed), outputs)


def ask_past(start: str, name: Words) -> Question:
    """Ask for the name of what the road from a node leads to.

    Example:
        >>> question = ask_past("mill", ("amber", "fox"))
        >>> " ".join(question.words), " ".join(question.answer)
        ('name past mill :', 'past mill amber fox <end>')
    """
    answer = ("past", start, *name, "<end>")
    return Question(("name", "past", start, ":"), answer, tuple((word,) for word in answer), name)


def ask_road(nodes: Sequence[str]) -> Question:
    """Ask where the roads lead from a node.

    Example:
        >>> question = ask_road(["mill", "river", "castle"])
        >>> " ".join(question.words), " ".join(question.answer), question.outputs
        ('road from mill :', 'mill river castle <end>', ('river', 'castle'))
    """
    answer = (*nodes, "<end>")
    return Question(
        ("road", "from", nodes[0], ":"), answer, tuple((word,) for word in answer), tuple(nodes[1:])
    )


def ask_words(which: str, words: Sequence[str]) -> Question:
    """Ask for the ``common`` or ``frequent`` words, in any order.

    Example:
        >>> question = ask_words("common", ["river", "mill"])
        >>> " ".join(question.words), " ".join(question.answer), question.allowed[0]
        ('common words :', 'river , mill <end>', ('river', 'mill'))
    """
    answer = _joined([(word,) for word in words])
    allowed = [(word,) for word in answer]
    for number in range(len(words)):
        allowed[2 * number] = tuple(words[number:])
    return Question((which, "words", ":"), answer, tuple(allowed), tuple(words))


def _joined(parts: Sequence[Words]) -> Words:
    words = [word for part in parts for word in (*part, ",")]
    return (*words[:-1], "<end>")
