"""Rotate kept keys to positions without gaps, if the policy is ``gapless``.

The keys of a layer are then at the rotary positions 0, 1, ... in the order of slots, in every row
and head. This is true before the policy first acts on a row. Whenever the policy acts, kept keys
are rotated back by as many places as were left out before them, and appended tokens follow directly
(`SeenTokens.skipped`, as after a restart). So the slots say where keys are, and nothing more is
saved, copied or reordered. All heads of all layers must keep equal numbers of a row's tokens.
"""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.model.rotary import RotaryChannels
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import gather_slots


def closed_up(keys: Tensor, positions: Tensor, kept: Tensor, turns: RotaryChannels) -> Tensor:
    """Return the kept keys, each rotated to its place among the kept keys of its row.

    ``keys`` are rotated to their places among all of them, and ``kept`` is -1 on the left of
    shorter rows.
    """
    places = _places(positions >= 0).gather(2, kept.clamp(min=0))
    return turns.moved(gather_slots(keys, kept), _places(kept >= 0) - places)


def _places(valid: Tensor) -> Tensor:
    return (valid.cumsum(dim=2) - 1).clamp(min=0)


def without_gaps(
    policy: CachePolicy, tokens: SeenTokens, layers: Sequence[PolicyLayer]
) -> SeenTokens:
    """Return the record of seen tokens, with rotary positions that continue after the kept ones."""
    counts = []
    for layer in layers:
        assert layer.positions is not None
        counts.append((layer.positions >= 0).sum(dim=2).to(tokens.lengths))
    every = torch.cat(counts, dim=1)
    fewest, most = every.amin(dim=1), every.amax(dim=1)
    unlike = (fewest < most).nonzero()
    if len(unlike):
        row = int(unlike[0])
        raise ValueError(
            f"select of {policy.selector}, which declares equal_counts, must keep equally many "
            f"tokens of a row in all heads and layers if gapless is True, got {int(fewest[row])} "
            f"to {int(most[row])} in row {row}"
        )
    skipped = tokens.lengths - most
    return attrs.evolve(tokens, skipped=skipped if bool(skipped.any()) else None)
