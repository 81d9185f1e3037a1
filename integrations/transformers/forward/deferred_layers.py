"""Let layers hold a whole prompt until every layer is scored, and then choose.

This is needed if a selector decides for all layers together, or if the policy reads its prompt
twice. The keys and values to choose among are held apart from the layer, with an outline of its
context but without queries. Once the decoder's output is known, `choose` stores what each layer
keeps. Where a sliding window bounds a row of a layer, there is nothing to choose. A layer behind a
drop has fewer tokens, and so gets a smaller part of the budget, which is the sum of what every head
would keep by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from kvpolicy.deferred_selection import DeferredLayer
from kvpolicy.integrations.transformers.forward.decoding.choosing import WindowSurvivors
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.policy import CachePolicy


@attrs.frozen(eq=False)
class DeferredKV:
    """The keys and values of a layer that will choose once all layers have been scored.

    Args:
        keys: The keys to choose among; see `PolicyLayer.store`.
        values: The values to choose among; see `PolicyLayer.store`.
        positions: Their positions; see `PolicyLayer.store`.
        undecided: The layer in the form that the policy decides on later.
        carried: See `PolicyLayer.store`.
        near: If the policy chooses only in some rows, what a sliding window leaves of the other
            rows; None if it chooses in all rows.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    undecided: DeferredLayer
    carried: Tensor | None = None
    near: WindowSurvivors | None = None


def choose(
    policy: CachePolicy, layers: list[PolicyLayer], waiting: Mapping[int, DeferredKV]
) -> None:
    """Let all deferred layers choose the tokens to keep, and store these.

    Args:
        policy: The policy.
        layers: The layers of the cache.
        waiting: The deferred layers, by index.

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
