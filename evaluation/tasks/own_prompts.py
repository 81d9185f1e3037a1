"""Make the default prompts of the bundled models."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from kvpolicy.evaluation.defaults import LONG_ANSWERS, NEEDLE, OWN_CONTEXTS
from kvpolicy.evaluation.tasks.long_answers.task import KINDS, STEP_TOKENS, LongAnswerTask
from kvpolicy.evaluation.tasks.prompts import Prompt, check_extent, needle_prompts


def long_prompts(context_len: int = 256, count: int = 40, seed: int = 0) -> list[Prompt]:
    """Return prompts with long answers, of two kinds: half loops, half chains.

    Args:
        context_len: Tokens of every prompt, at least 64; short ones hold fewer statements and have
            shorter answers.
        count: Number of prompts, at least 2; of an odd number the larger half is of a loop.
        seed: Of the draws.

    Raises:
        ValueError: ``context_len`` or ``count`` is out of its range.
    """
    check_extent(context_len, count)
    return [
        Prompt(drawn.input_ids, (drawn.answer,), kind, step_tokens=STEP_TOKENS)
        for kind, share in zip(KINDS, (count - count // 2, count // 2), strict=True)
        for drawn in LongAnswerTask(kind, context_len).prompts(share, seed)
    ]


@attrs.frozen
class OwnPrompts:
    """Makes the prompts with which a bundled model is evaluated by default.

    Args:
        make: Makes them of their length in tokens, their number and a seed.
        context: Their length where no other is asked for.
        words: What they are called.
    """

    make: Callable[[int, int, int], list[Prompt]]
    context: int
    words: str


OWN_PROMPTS = {
    NEEDLE: OwnPrompts(needle_prompts, OWN_CONTEXTS[NEEDLE], "needle prompts"),
    LONG_ANSWERS: OwnPrompts(long_prompts, OWN_CONTEXTS[LONG_ANSWERS], "prompts"),
}
"""By the name of the bundled model."""
