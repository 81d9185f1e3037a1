"""LagKV (arXiv 2504.04704)."""

import attrs

from kvpolicy.interfaces import Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.scorers.lag import LagKVScorer


@documented
@attrs.frozen
class LagKV(EvictionMethod):
    """Keeps the tokens that differ most from the tokens after them; needs no query.

    The same share of every run of ``lag_size`` tokens is kept; the first tokens and the last run
    rank above all others (see `LagKVScorer`). Prefill is complete.

    Args:
        num_sinks: First tokens of the context, at least 0.
        lag_size: Tokens of a run, at least 1.

    Example:
        >>> LagKV(retention_tokens=512).scorer
        LagKVScorer(num_sinks=4, lag_size=128)

    Source: LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important
    (arXiv 2504.04704). Here the budget refers to the whole context and 4 first tokens rank first,
    as in kvpress; the authors have 16 first tokens, and a rate for each run. If the budget does not
    exceed the first tokens and the last run, only tokens of these are kept.
    """

    paper = "arXiv 2504.04704"

    num_sinks: int = attrs.field(default=4, kw_only=True)
    lag_size: int = attrs.field(default=128, kw_only=True)

    def _scorer(self) -> Scorer:
        return LagKVScorer(num_sinks=self.num_sinks, lag_size=self.lag_size)
