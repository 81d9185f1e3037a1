"""Refuse policies that need masks which flash attention cannot take.

Its kernels see the keys of a row in their order, up to the query's own, and count windows in keys.
They have no mask for each head, and none that leaves keys out.
"""

from __future__ import annotations

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.policy import CachePolicy


def check_policy(
    policy: CachePolicy, implementation: str, *, acts: bool, windows: bool, one_choice: bool
) -> None:
    """Check that no layer will need a mask under flash attention, now or later in an answer.

    Args:
        policy: The policy.
        implementation: The model's attention implementation.
        acts: Whether the policy drops tokens or restarts in the model.
        windows: Whether the model has layers with sliding windows.
        one_choice: Whether all heads of a layer keep the same tokens in any case.

    Raises:
        UnsupportedModelError: Some layer may need one.
    """
    selectors = [policy.selector]
    if policy.decoding is not None:
        selectors.append(policy.decoding.selector)
    if acts and windows:
        why = (
            "drops tokens or restarts in a model with sliding windows, which flash attention "
            "counts in keys: without the dropped tokens, they would reach too far back"
        )
    elif any(each.unequal_heads for each in selectors) and not one_choice:
        why = (
            "may keep different numbers of tokens in the heads of a layer, for which flash "
            "attention has no mask"
        )
    else:
        return
    raise UnsupportedModelError(
        f"attn_implementation of the model must not be {implementation!r} if {policy} {why}; load "
        "the model with attn_implementation='sdpa' or 'eager'"
    )
