"""Make questions of seven kinds, each with an answer and the words that are scored."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from .sentences import Words

KINDS = ("single", "multi-key", "multi-query", "two-hop", "tracing", "common", "frequent")


@attrs.frozen
class Question:
    """A question about a document, with its right answer, in words.

    Attributes:
        words: the question.
        answer: the right continuation of it, the closing ``<end>`` included.
        outputs: the words that a right continuation holds.
        through: the key that leads from the question to the answer, where it takes two hops.
    """

    words: Words
    answer: Words
    outputs: Words
    through: str | None = None


def ask_names(pairs: Sequence[tuple[Words, Words]]) -> Question:
    """Make the question for the names that a document gives to one or more keys.

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
    return Question(("name", *listed, *keys[-1], ":"), answer, outputs)


def ask_past(start: str, key: str, name: Words) -> Question:
    """Make a two-hop question: the name of the key to which a given node is linked.

    Example:
        >>> question = ask_past("mill", "river", ("amber", "fox"))
        >>> " ".join(question.words), " ".join(question.answer)
        ('name past mill :', 'past mill amber fox <end>')
    """
    return Question(("name", "past", start, ":"), ("past", start, *name, "<end>"), name, key)


def ask_road(nodes: Sequence[str]) -> Question:
    """Make the question for the nodes that follow one node along a chain of links.

    Example:
        >>> question = ask_road(["mill", "river", "castle"])
        >>> " ".join(question.words), " ".join(question.answer), question.outputs
        ('road from mill :', 'mill river castle <end>', ('river', 'castle'))
    """
    return Question(("road", "from", nodes[0], ":"), (*nodes, "<end>"), tuple(nodes[1:]))


def ask_word(which: str, word: str) -> Question:
    """Make the question for a document's most common or most frequent word.

    Example:
        >>> question = ask_word("common", "river")
        >>> " ".join(question.words), " ".join(question.answer)
        ('common word :', 'common river <end>')
    """
    return Question((which, "word", ":"), (which, word, "<end>"), (word,))


def _joined(parts: Sequence[Words]) -> Words:
    words = [word for part in parts for word in (*part, ",")]
    return (*words[:-1], "<end>")
