"""Layers that keep all of a prompt until every one was scored, and then choose."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from kvpolicy.deferred_selection import DeferredLayer
from kvpolicy.integrations.transformers.forward.decoding.choosing import Near
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.policy import CachePolicy


@attrs.frozen(eq=False)
class Waiting:
    """A layer whose choice is still to come; what it holds stays as it was till then.

    Args:
        keys: What it is to choose among, as in `PolicyLayer.store`.
        values: Likewise.
        positions: Likewise.
        undecided: The layer for the policy.
        carried: As in `PolicyLayer.store`.
        near: Where the policy chooses in some rows only, what a sliding window leaves of the
            others; None where it chooses in all.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    undecided: DeferredLayer
    carried: Tensor | None = None
    near: Near | None = None


def choose(policy: CachePolicy, layers: list[PolicyLayer], waiting: Mapping[int, Waiting]) -> None:
    """Let all layers choose that have waited for it.

    Args:
        policy: The policy.
        layers: What each layer of the model holds.
        waiting: By index.

    Raises:
        TypeError: See `CachePolicy.decide_layers`.
        ShapeError: See `CachePolicy.decide_layers`.
        ValueError: See `CachePolicy.decide_layers`.
    """
    order = sorted(waiting)
    found = policy.decide_layers([waiting[index].undecided for index in order])
    for index, chosen in zip(order, found, strict=True):
        each = waiting[index]
        kept = chosen if each.near is None else each.near.kept(chosen)
        layers[index].store(each.keys, each.values, each.positions, kept, each.carried)
