"""Count how many tokens layers hold, where a policy needs equal numbers in all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvpolicy.integrations.transformers.state.layer import PolicyLayer


def held_counts(layers: Iterable[PolicyLayer], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the fewest and the most tokens that any head of any layer holds, for each row.

    Args:
        layers: Layers, all of which hold keys and values.
        like: ``[batch]`` int64, whose dtype and device the results get.
    """
    fewest, most = [], []
    for layer in layers:
        assert layer.positions is not None
        counts = (layer.positions >= 0).sum(dim=2)
        fewest.append(counts.amin(dim=1).to(like))
        most.append(counts.amax(dim=1).to(like))
    return torch.stack(fewest).amin(dim=0), torch.stack(most).amax(dim=0)
