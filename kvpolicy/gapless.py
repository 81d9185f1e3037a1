"""Checks which parts fit a policy with ``gapless=True``, which renumbers kept tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.decoding import DecodingEviction
from kvpolicy.interfaces import KVSelector, PropagationPolicy
from kvpolicy.repetition import Repetition


def check_gapless(
    selector: KVSelector,
    propagation: PropagationPolicy,
    decoding: DecodingEviction | None,
    rereading: Repetition | None,
) -> None:
    """Check that a policy's parts work with ``gapless=True``, which renumbers kept tokens.

    The next token's rotary position is then the number of tokens held, which must be the same in
    all layers.

    Args:
        selector: The policy's selector.
        propagation: The policy's propagation policy.
        decoding: The policy's bound for answers.
        rereading: The policy's second reading.

    Raises:
        ValueError: Heads or layers may hold different numbers of tokens; or tokens are chosen at
            another time than at the end of a prompt.
    """
    if not selector.equal_counts:
        raise ValueError(
            "gapless must be False where heads or layers may keep unlike numbers of tokens, since "
            "the next token then has no one position behind them, got gapless=True with "
            f"{selector}; use a selector that declares equal_counts, such as GQAGroupSelector"
        )
    if propagation.restarts:
        raise ValueError(
            f"gapless must be False where {propagation} restarts the prefill, which reads the "
            "chosen tokens at positions without gaps itself, got True"
        )
    if decoding is not None:
        raise ValueError(
            "decoding must be None where gapless is True, since keys are turned at the end of a "
            f"prompt only, not while an answer is decoded, got {decoding}"
        )
    if rereading is not None:
        raise ValueError(
            "rereading must be None where gapless is True, since a prompt is read again at the "
            f"positions of the first time, got {rereading}"
        )


def check_acting(propagation: PropagationPolicy, acting: Sequence[int]) -> None:
    """Raise ValueError if the propagation policy drops tokens, which ``gapless=True`` forbids.

    Args:
        propagation: The policy's propagation policy.
        acting: Layers of the model after which it drops tokens.

    Raises:
        ValueError: Tokens are dropped, so that later layers would hold fewer than earlier ones.
    """
    if acting:
        raise ValueError(
            f"gapless must be False where tokens are dropped, as {propagation} does at layers "
            f"{list(acting)}, since layers then may hold unlike numbers of tokens, got True"
        )
