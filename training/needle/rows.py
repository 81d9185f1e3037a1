"""Draw training rows: rows with repeated symbols, and needle rows with many questions."""

import random

import attrs

from kvpolicy.evaluation.tasks.needle.filler import scattered
from kvpolicy.evaluation.tasks.needle.vocabulary import (
    BOS,
    END,
    KEY,
    LINK,
    QUERY,
    QUERY2,
    SYMBOLS,
)

Pieces = list[list[int]]


@attrs.frozen
class RowPlan:
    """The length of a needle row, and how many pairs, links and two-hop questions it has.

    Args:
        length: tokens in the row.
        num_pairs: key-value pairs.
        has_links: whether a link leads to each pair.
        num_values: values of a pair; rows of one value are the easiest.
        two_hop_share: chance of each question to be a two-hop one, in [0, 1].
        links_first: whether all links come before all pairs. Then a link is read before its pair,
            so that a model cannot resolve the second hop while it reads the link.
    """

    length: int
    num_pairs: int
    has_links: bool = False
    num_values: int = 3
    two_hop_share: float = 0.0
    links_first: bool = False


@attrs.frozen
class NeedleRow:
    """A needle row in pieces: the context, then questions with filler around each.

    ``bridges`` has one entry per question: the key that a two-hop question finds first, None for a
    one-hop question.
    """

    context: Pieces
    asked: Pieces
    bridges: list[int | None]


def copy_row(rng: random.Random, length: int) -> tuple[list[int], list[int]]:
    """Return symbols and repeated chunks of them, and the positions with a predictable token.

    Example:
        >>> row, known = copy_row(random.Random(0), 48)
        >>> len(row), len(set(row)), min(known) >= 24
        (48, 24, True)
    """
    half = length // 2
    source = rng.sample(SYMBOLS, half)
    row, known = list(source), list[int]()
    while len(row) < length:
        size = rng.randint(4, 8)
        start = rng.randrange(half - size + 1)
        known += range(len(row), len(row) + size - 1)
        row += source[start : start + size]
    return row[:length], [position for position in known if position + 1 < length]


def needle_row(rng: random.Random, plan: RowPlan) -> NeedleRow:
    """Return a random row of exactly ``plan.length`` tokens.

    Example:
        >>> row = needle_row(random.Random(0), RowPlan(64, num_pairs=4))
        >>> sum(map(len, row.context + row.asked)), len(row.bridges)
        (64, 4)
    """
    segments, questions, bridges = _contents(rng, plan)
    room = plan.length - 1 - sum(map(len, segments))
    count = min(len(questions), room // (plan.num_values + 3))
    questions, bridges = questions[:count], bridges[:count]
    room -= sum(map(len, questions))
    behind = rng.randint(0, min(room, 2 * count))
    context = [[BOS], *scattered(rng, segments, room - behind)]
    return NeedleRow(context, scattered(rng, questions, behind), bridges)


def _contents(rng: random.Random, plan: RowPlan) -> tuple[Pieces, Pieces, list[int | None]]:
    """Draw a row's pairs and links, its questions with answers, and the bridges."""
    width = 1 + plan.num_values
    symbols = rng.sample(SYMBOLS, plan.num_pairs * (width + 1))
    pairs = [symbols[index * width : (index + 1) * width] for index in range(plan.num_pairs)]
    names = symbols[plan.num_pairs * width :]
    questions, bridges = [], []
    for name, pair in rng.sample(list(zip(names, pairs, strict=True)), plan.num_pairs):
        two_hop = plan.has_links and rng.random() < plan.two_hop_share
        questions.append([*([QUERY2, name] if two_hop else [QUERY, pair[0]]), *pair[1:], END])
        bridges.append(pair[0] if two_hop else None)
    stored = [[KEY, *pair, END] for pair in pairs]
    linked = zip(names, pairs, strict=True) if plan.has_links else ()
    links = [[LINK, name, pair[0]] for name, pair in linked]
    if plan.links_first:
        return rng.sample(links, len(links)) + stored, questions, bridges
    return rng.sample(links + stored, len(links + stored)), questions, bridges
