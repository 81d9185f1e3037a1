"""Checks which parts fit a policy with ``gapless=True``, which renumbers kept tokens."""

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
    all layers, so tokens may be chosen at the end of a prompt only.
    """
    if not selector.equal_counts:
        raise ValueError(
            "gapless must be False if heads or layers may keep different numbers of tokens, "
            "since the next token then has no single position after them, got gapless=True with "
            f"{selector}; use a selector that declares equal_counts, such as GQAGroupSelector"
        )
    if selector.decides_together:
        raise ValueError(
            "gapless must be False if layers choose only after all of them were scored, since keys "
            f"are rotated where a layer chooses, got True with {selector}"
        )
    if propagation.restarts:
        raise ValueError(
            f"gapless must be False if {propagation} restarts the prefill, since a restart "
            "already reads the chosen tokens at positions without gaps, got True"
        )
    if decoding is not None:
        raise ValueError(
            "decoding must be None if gapless is True, since keys are rotated only at the end of "
            f"a prompt, not while an answer is decoded, got {decoding}"
        )
    if rereading is not None:
        raise ValueError(
            "rereading must be None if gapless is True, since the second reading uses the "
            f"positions of the first one, got {rereading}"
        )
