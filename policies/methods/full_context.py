"""The baseline of every comparison."""

from __future__ import annotations

from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.selectors.keep_all import KeepAllSelector
from kvpolicy.policy import CachePolicy


class FullContext(CachePolicy):
    """Keeps everything and drops nothing: the baseline of every comparison.

    Example:
        >>> FullContext().prefill_compute_rate(num_layers=32)
        1.0
    """

    def __init__(self) -> None:
        super().__init__(None, KeepAllSelector(), PassAllPropagation())
