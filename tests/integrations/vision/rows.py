"""The rows that the tests read."""

from functools import cache

from transformers import PreTrainedModel

from .models import FAMILIES
from .prompts import Part, Picture, words

# Where 1 gives a choice that is a near tie.
SEEDS = {"gemma3": 2, "qwen2_5_vl": 2}


@cache
def model_of(name: str, implementation: str = "sdpa") -> PreTrainedModel:
    """The family's model, always with the same weights."""
    return FAMILIES[name].build(SEEDS.get(name, 1), attn_implementation=implementation)


def first_parts(name: str) -> list[Part]:
    """First prompts: a long one with two images where the family takes two, one with one."""
    if FAMILIES[name].leads:
        return [[Picture(1), *words(1, 37)], [Picture(3), *words(3, 20)]]
    return [
        [*words(1, 9), Picture(1, (4, 6)), *words(2, 13), Picture(2, (5, 3)), *words(3, 19)],
        [*words(4, 6), Picture(3, (3, 7)), *words(5, 23)],
    ]


def second_parts(name: str) -> list[Part]:
    """What the rows add in a later turn, of one length; an image too where the family takes it."""
    if FAMILIES[name].second_image:
        return [[*words(6, 5), Picture(4), *words(7, 8)], [*words(8, 7), Picture(5), *words(9, 6)]]
    return [words(6, 13), words(8, 13)]


def prompts_of(name: str, rows: tuple[int, ...], *, turns: int) -> list[list[Part]]:
    """Of each row its prompt of every turn."""
    both = [first_parts(name), second_parts(name)][:turns]
    return [[parts[row] for parts in both] for row in rows]
