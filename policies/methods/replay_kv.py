"""ReplayKV: KVzip's choice without a second reading of the prompt."""

import attrs

from kvpolicy.budgets import DefaultRate
from kvpolicy.checks import check_count, check_kind, check_rate
from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.methods.method import Parts
from kvpolicy.policies.propagation.cross_layer import CrossLayerPropagation
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.scorers.replayed import ReplayedAttentionScorer
from kvpolicy.policies.scorers.wrapping import ValueAwareScorer
from kvpolicy.policies.selectors.global_threshold import GlobalThresholdSelector
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
from kvpolicy.policies.selectors.same_tokens import SameTokensSelector

# Neighbouring tokens that go on together: answers are spans.
SPAN = 7


@documented
@attrs.frozen
class ReplayKV(EvictionMethod):
    """Keeps the tokens that the prompt's own queries would attend to if asked after the prompt.

    For prompts whose questions come later: neither a question nor a second reading is needed. The
    queries of the prompt are rotated to the position after it, and attend to all of it. A token's
    saliency is the largest attention that it receives from the queries just before it, times the
    norm of its value (see `ReplayedAttentionScorer`). One threshold over all layers and heads
    decides which tokens stay (`GlobalThresholdSelector`); while an answer is decoded, each head
    chooses by itself. If ``tsp_rate`` is below 1, fewer tokens go on after layer ``tsp_layer``:
    spans of tokens that stand out most in any head of any layer so far (`CrossLayerPropagation`).
    This is not a published method: it is `KVzip` with the first reading's queries in place of a
    second reading, found by this project's study.

    Args:
        retention_rate: Fraction of the context that layers and heads keep on average, in (0, 1].
        window_size: Last tokens of the context that are always kept, at least 0.
        num_sinks: First tokens of the context, always kept, at least 0.
        head_uniform: Whether every KV head of every layer keeps the same tokens, those that stand
            out most in any of them (`SameTokensSelector`), as vLLM needs it.
        retention_tokens: Number of tokens that layers and heads keep on average, at least 1, in
            place of the rate.
        tsp_rate: Fraction of the context that goes on after layer ``tsp_layer``, in (0, 1]; 1 drops
            nothing, so that prefill is complete.
        tsp_layer: Index of the layer after which tokens are dropped, from 0; None for
            ``num_layers // 2 - 1``.
        protect: First tokens of the context that are always kept, at least 0; where more than
            ``num_sinks``.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or with ``head_uniform`` the retention exceeds
            what goes on.

    Example:
        >>> ReplayKV(retention_rate=0.2).prefill_compute_rate(num_layers=32)
        1.0
        >>> ReplayKV(retention_rate=0.2, tsp_rate=0.25).prefill_compute_rate(num_layers=32)
        0.625
    """

    retention_rate: float | None = DefaultRate(0.2)
    window_size: int = attrs.field(default=0, kw_only=True)
    num_sinks: int = attrs.field(default=4, kw_only=True)
    head_uniform: bool = attrs.field(default=False, kw_only=True)
    tsp_rate: float = attrs.field(default=1.0, kw_only=True)
    tsp_layer: int | None = attrs.field(default=None, kw_only=True)

    def _scorer(self) -> Scorer:
        return ValueAwareScorer(ReplayedAttentionScorer())

    def _parts(self) -> Parts:
        check_kind("head_uniform", self.head_uniform, bool)
        check_count("protect", self.protect)
        check_count("num_sinks", self.num_sinks)
        if self.head_uniform:
            selector = self._budgeted(SameTokensSelector)
        else:
            # In a later turn, other queries judge what was held than the turn's own tokens.
            selector = self._budgeted(GlobalThresholdSelector, turns_apart=True)
        return self._scorer(), selector, self._propagation()

    @property
    def _first(self) -> int:
        return max(self.protect, self.num_sinks)

    def _bounded_selector(self, tokens: int) -> KVSelector | None:
        # Layers choose one by one while an answer is decoded.
        return GQAGroupSelector(
            retention_tokens=tokens, window_size=self.window_size, protect=self._first
        )

    def _propagation(self) -> PropagationPolicy:
        if self.tsp_layer is not None:
            check_count("tsp_layer", self.tsp_layer)
        if check_rate("tsp_rate", self.tsp_rate) == 1:
            return PassAllPropagation()
        return CrossLayerPropagation(
            self.tsp_rate,
            tsp_layer=self.tsp_layer,
            window_size=max(self.window_size, 1),
            protect=self._first,
            voting_layers=None,
            kernel_size=SPAN,
        )
