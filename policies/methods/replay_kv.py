"""ReplayKV: what a second reading of the prompt would ask, guessed from the first."""

from __future__ import annotations

import attrs

from kvpolicy.budgets import DefaultRate
from kvpolicy.checks import check_count, check_kind
from kvpolicy.interfaces import KVSelector, Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.scorers.replayed import ReplayedAttentionScorer
from kvpolicy.policies.selectors.global_threshold import GlobalThresholdSelector
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector


@documented
@attrs.frozen
class ReplayKV(EvictionMethod):
    """Keeps the tokens that the prompt's own queries would attend to if asked after the prompt.

    For prompts whose questions come later: no question and no second reading is needed. Every query
    of the prompt is rotated to the position after the prompt, attends to all of it, and the largest
    attention that a token receives is its saliency (see `ReplayedAttentionScorer`). One threshold
    over all layers and heads decides which tokens stay (`GlobalThresholdSelector`). Prefill is
    complete. This is not a published method: it is `KVzip` without the second reading.

    Args:
        retention_rate: Fraction of the context that layers and heads keep on average, in (0, 1].
        window_size: Last tokens of the context that are always kept, at least 0.
        num_sinks: First tokens of the context, always kept, at least 0.
        head_uniform: Whether every KV head of every layer keeps the same number of tokens.
        protect: First tokens of the context that are always kept, at least 0; where more than
            ``num_sinks``.

    Example:
        >>> ReplayKV(retention_rate=0.2).prefill_compute_rate(num_layers=32)
        1.0
        >>> ReplayKV(head_uniform=True).selector
        GQAGroupSelector(retention_rate=0.2, window_size=0, retention_tokens=None, protect=4)
    """

    retention_rate: float | None = DefaultRate(0.2)
    window_size: int = attrs.field(default=0, kw_only=True)
    num_sinks: int = attrs.field(default=4, kw_only=True)
    head_uniform: bool = attrs.field(default=False, kw_only=True)

    def _scorer(self) -> Scorer:
        return ReplayedAttentionScorer()

    def _selector(self) -> KVSelector:
        check_kind("head_uniform", self.head_uniform, bool)
        kind: type[GlobalThresholdSelector] | type[GQAGroupSelector]
        kind = GQAGroupSelector if self.head_uniform else GlobalThresholdSelector
        return kind(
            self.retention_rate,
            window_size=self.window_size,
            retention_tokens=self.retention_tokens,
            protect=max(
                check_count("protect", self.protect), check_count("num_sinks", self.num_sinks)
            ),
        )
