"""Make documents of every kind and any length, each with its question."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from .counts import common_list, frequent_list
from .questions import Question, ask_names, ask_past, ask_road, ask_word
from .sentences import (
    LIST_WORDS,
    Words,
    filler,
    in_order,
    list_sentences,
    name_sentence,
    road_sentences,
    saw_sentences,
)
from .vocabulary import NOUN_LIST

FILLER_NOUNS = 24
NAME_WORDS = 2
LIST_QUESTION = 3
"""Tokens of a question for listed words."""


@attrs.frozen
class LookupPlan:
    """What a generated lookup document contains: how many key-name pairs and chains of nodes.

    Args:
        num_asked: keys that are asked for.
        num_others: keys that nobody asks for.
        num_nodes: nodes of each chain of roads; none without chains.
        num_chains: chains of roads; the first is asked for.
        num_links: roads that lead to keys; the name past the first is asked for.
    """

    num_asked: int = 1
    num_others: int = 0
    num_nodes: int = 0
    num_chains: int = 0
    num_links: int = 0


def common_document(
    rng: random.Random, nouns: Sequence[str], size: int, share: float = 0.1, ratio: int = 4
) -> tuple[list[Words], Question]:
    """Make a word list of ``size`` tokens with a question for its most common word."""
    room = size - LIST_QUESTION
    num_words = room // (LIST_WORDS + 2) * LIST_WORDS
    words, common = common_list(rng, nouns, num_words, share, ratio)
    sentences = list_sentences(words)
    rest = [noun for noun in nouns if noun != common]
    said = filler(rng, rest, room - _tokens(sentences))
    return [*said, *sentences], ask_word("common", common)


def frequent_document(
    rng: random.Random, nouns: Sequence[str], size: int, num_rare: int = 13
) -> tuple[list[Words], Question]:
    """Make a text of ``size`` tokens, half of it filler, that asks for its most frequent word.

    They are of ``size`` tokens together.
    """
    room = size - LIST_QUESTION
    words, frequent = frequent_list(rng, nouns, max(room // 2 // 8, 5) * 3, num_rare)
    sentences = saw_sentences(words)
    rest = [noun for noun in nouns if noun not in words][:FILLER_NOUNS]
    said = filler(rng, rest, room - _tokens(sentences))
    return [said[0], *in_order(rng, [said[1:], sentences])], ask_word("frequent", frequent)


def lookup_document(
    rng: random.Random, plan: LookupPlan, size: int
) -> tuple[list[Words], Question]:
    """Make a document that names keys and links nodes, with filler, and a question about it.

    Raises:
        ValueError: The statements of the plan do not fit.
    """
    nouns = rng.sample(NOUN_LIST, len(NOUN_LIST))
    said, nouns = nouns[:FILLER_NOUNS], nouns[FILLER_NOUNS:]

    def take(count: int) -> Words:
        taken = tuple(nouns[:count])
        del nouns[:count]
        return taken

    named = [(take(1), take(NAME_WORDS)) for _ in range(plan.num_asked + plan.num_others)]
    chains = [take(plan.num_nodes) for _ in range(plan.num_chains)]
    chains += [(take(1)[0], key[0]) for key, _ in named[: plan.num_links]]
    question = _ask(plan, named, chains)
    groups = [[name_sentence(rng, key, name)] for key, name in named]
    groups += [road_sentences(chain) for chain in chains]
    room = size - len(question.words) - sum(_tokens(group) for group in groups)
    if room < 0:
        raise ValueError(f"size must be at least {size - room} tokens for {plan}, got {size}")
    fillers = filler(rng, said, room)
    # The filler's first sentence may lack its beginning, so it comes first in the document.
    return [*fillers[:1], *in_order(rng, [fillers[1:], *groups])], question


def _ask(
    plan: LookupPlan, named: Sequence[tuple[Words, Words]], chains: Sequence[Words]
) -> Question:
    if plan.num_links:
        return ask_past(chains[0][0], chains[0][1], named[0][1])
    if chains:
        return ask_road(chains[0])
    return ask_names(named[: plan.num_asked])


def _tokens(sentences: Sequence[Words]) -> int:
    return sum(map(len, sentences))
