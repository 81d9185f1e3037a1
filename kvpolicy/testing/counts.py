"""Checks how many tokens a selector says it keeps, from lengths alone.

Part of `kvpolicy.testing`.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.host_counts import known_counts
from kvpolicy.interfaces import KVSelector
from kvpolicy.testing.declared import require


def check_kept_counts(
    component: KVSelector, context: LayerContext, saliency: Tensor, kept: Tensor
) -> None:
    """Check that a selector keeps as many tokens as its ``kept_counts`` says.

    Args:
        component: The selector.
        context: A layer without known counts.
        saliency: The saliency of its keys.
        kept: The indices that the selector keeps of it.

    Raises:
        AssertionError: It keeps another number of tokens.
    """
    held = context.valid.sum(dim=-1)
    if not bool((held == held[:, :1]).all()):  # unknown if heads hold different numbers
        return
    told = attrs.evolve(context, held_len=tuple(held[:, 0].tolist()))
    require(
        torch.equal(component.select(saliency, told), kept),
        "select must keep the same tokens whether held_len is known or not",
    )
    counts: object = known_counts(component, told)
    if counts is None:
        return
    ints = isinstance(counts, tuple) and all(type(each) is int for each in counts)
    require(ints, f"kept_counts must return a tuple of ints or None, got {counts!r}")
    found = (kept >= 0).sum(dim=-1).tolist()
    assert isinstance(counts, tuple)
    require(
        found == [[count] * context.kv_heads for count in counts],
        "kept_counts must return how many tokens select keeps of each row in every head, got "
        f"{counts}, but select keeps {found}",
    )
