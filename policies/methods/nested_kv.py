"""NestedKV (arXiv 2605.26678)."""

import attrs

from kvpolicy.checks import check_count
from kvpolicy.interfaces import KVSelector, Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.scorers.anomaly import KeyAnomalyScorer
from kvpolicy.policies.selectors.adaptive_head import AdaptiveHeadSelector


@documented
@attrs.frozen
class NestedKV(EvictionMethod):
    """Keeps the keys unlike all others, unlike their block's or unlike those just before them.

    As `KeyDiff`, with three means in place of one (see `KeyAnomalyScorer`); the KV heads of a layer
    share its budget (see `AdaptiveHeadSelector`). Needs no query; prefill is complete.

    Args:
        retention_rate: Fraction of the context that heads keep on average, in (0, 1].
        window_size: Last tokens of the context that are always kept, at least 0.
        num_sinks: First tokens of the context, always kept, at least 0.
        local_size: Tokens up to each one that are its third mean, at least 1.
        block_size: Tokens of a block, at least 1; None for a 32nd of the context, between 128 and
            256.
        floor: Share of the free places that every head fills on its own, in [0, 1].
        retention_tokens: Number of tokens that heads keep on average, at least 1, in place of the
            rate.
        protect: First tokens of the context that are always kept, at least 0; where more than
            ``num_sinks``.

    Example:
        >>> NestedKV(retention_tokens=512).selector.protect
        4

    Source: NestedKV: Nested Memory Routing for Long-Context KV Cache Compression (arXiv
    2605.26678), whose numbers are the defaults here.
    """

    paper = "arXiv 2605.26678"

    window_size: int = attrs.field(default=0, kw_only=True)
    num_sinks: int = attrs.field(default=4, kw_only=True)
    local_size: int = attrs.field(default=64, kw_only=True)
    block_size: int | None = attrs.field(default=None, kw_only=True)
    floor: float = attrs.field(default=0.2, kw_only=True)

    def _scorer(self) -> Scorer:
        return KeyAnomalyScorer(local_size=self.local_size, block_size=self.block_size)

    def _selector(self) -> KVSelector:
        return self._budgeted(AdaptiveHeadSelector, floor=self.floor)

    @property
    def _first(self) -> int:
        return max(check_count("protect", self.protect), check_count("num_sinks", self.num_sinks))
