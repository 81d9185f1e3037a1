"""Keys that are turned to positions without gaps, where the policy asks.

What a layer holds then stands at the rotary positions 0, 1, ... in the order of its slots, in every
row and head: those that a row's first act finds are its own, each act closes what gaps it makes,
and what is appended follows. So nothing but the number of tokens held has to be known.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch import Tensor

from kvpolicy.integrations.transformers.model.rotary import Turns
from kvpolicy.integrations.transformers.state.held_counts import held_counts
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import gather_slots


def closed_up(keys: Tensor, positions: Tensor, kept: Tensor, turns: Turns) -> Tensor:
    """The keys that a layer keeps, each turned back to its place among them.

    Args:
        keys: ``[batch, kv_heads, key_len, head_dim]``, turned to their places among all of these.
        positions: ``[batch, kv_heads, key_len]`` int64, -1 on padding.
        kept: ``[batch, kv_heads, kept_len]`` int64, ascending; -1 on the left of shorter rows.
        turns: How the layer turns.

    Returns:
        ``[batch, kv_heads, kept_len, head_dim]``.
    """
    places = _places(positions >= 0).gather(2, kept.clamp(min=0))
    # Sizes stay: these keys have been scaled when they were turned first.
    plain = attrs.evolve(turns, scale=1.0)
    return plain.turned(gather_slots(keys, kept), _places(kept >= 0) - places)


def _places(valid: Tensor) -> Tensor:
    return (valid.cumsum(dim=2) - 1).clamp(min=0)


def without_gaps(
    policy: CachePolicy, tokens: SeenTokens, layers: Sequence[PolicyLayer]
) -> SeenTokens:
    """The tokens seen, of which the next is read behind as many as layers hold.

    Args:
        policy: A gapless one.
        tokens: Those seen, the last prompt included.
        layers: What each layer has kept.

    Raises:
        ValueError: Heads or layers keep unlike numbers of tokens.
    """
    fewest, most = held_counts(layers, tokens.lengths)
    unlike = (fewest < most).nonzero()
    if len(unlike):
        row = int(unlike[0])
        raise ValueError(
            f"select of {policy.selector}, which declares equal_counts, must keep as many tokens "
            f"of a row in all heads and layers where gaps are closed, got {int(fewest[row])} to "
            f"{int(most[row])} of row {row}"
        )
    skipped = tokens.lengths - most
    return attrs.evolve(tokens, skipped=skipped if bool(skipped.any()) else None)
