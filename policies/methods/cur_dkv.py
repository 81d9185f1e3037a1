"""CurDKV (arXiv 2509.15038)."""

import attrs

from kvpolicy.interfaces import Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.scorers.leverage import CURScorer


@documented
@attrs.frozen
class CurDKV(EvictionMethod):
    """Keeps the tokens whose keys and values are large among their neighbours; needs no query.

    Keys of large norm are kept, the opposite of `KeyNorm` (see `CURScorer`). Prefill is complete.

    Args:
        num_sinks: First tokens of the context, which come before all others, at least 0.
        local_size: Tokens among which norms are compared, at least 1.

    Example:
        >>> CurDKV(retention_tokens=512).scorer
        CURScorer(num_sinks=4, local_size=16)

    Source: CurDKV (arXiv 2509.15038), as kvpress approximates it: by shares of squared norms.
    """

    paper = "arXiv 2509.15038"

    num_sinks: int = attrs.field(default=4, kw_only=True)
    local_size: int = attrs.field(default=16, kw_only=True)

    def _scorer(self) -> Scorer:
        return CURScorer(num_sinks=self.num_sinks, local_size=self.local_size)
