"""`Decision`: what a policy chose at one layer."""

import attrs
from torch import Tensor

from kvpolicy.deferred_selection import DeferredLayer


@attrs.frozen(eq=False)
class Decision:
    """A policy's decision at one layer: which tokens it keeps, and which go on to the next layer.

    Args:
        kept: ``[batch, kv_heads, kept_len]``; of one head if all heads share the stored keys.
            None if the policy `decides_later`.
        passed_on: ``[batch, passed_len]``; None for all.
        state: The state that the scorer of the policy's `DecodingEviction` keeps for each key, kept
            or not; None if it keeps no state. See `Scorer.update`.
        undecided: The layer to pass to `CachePolicy.decide_layers`, if there is no ``kept`` yet.
        saliency: The saliency of the keys, for later layers that read it; None if the scorer was
            not called.
        counts: For each row, how many tokens each head keeps, if this is known without reading
            ``kept``; see `KVSelector.kept_counts`.
    """

    kept: Tensor | None
    passed_on: Tensor | None
    state: Tensor | None = None
    saliency: Tensor | None = None
    undecided: DeferredLayer | None = None
    counts: tuple[int, ...] | None = None
