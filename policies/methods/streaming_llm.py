"""StreamingLLM (arXiv 2309.17453)."""

import attrs

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.selectors.sink_and_recent import SinkAndRecentSelector


@documented
@attrs.frozen
class StreamingLLM(Method):
    """Keeps the first ``num_sinks`` tokens and the most recent ones; prefill is complete.

    Args:
        num_sinks: First tokens that are always kept, at least 0.
        gapless: Whether positions are renumbered within the cache at the end of the prompt, as in
            the paper; see `CachePolicy`. Cannot be combined with ``decoding``.

    Example:
        >>> StreamingLLM(retention_tokens=2048).selector.num_sinks
        4
        >>> print(StreamingLLM(retention_tokens=2048, gapless=True))
        StreamingLLM(retention_tokens=2048, gapless=True)

    Source: Efficient Streaming Language Models with Attention Sinks (arXiv 2309.17453). The paper
    evicts at every step and renumbers positions within the cache; here, as in FastKV's comparison,
    the prompt is cut once and tokens keep their positions, unless ``gapless``. With ``decoding``
    the oldest tokens except the sinks are dropped after every 128 new tokens.
    """

    paper = "arXiv 2309.17453"

    retention_rate: float | None = DefaultRate(0.1)
    num_sinks: int = attrs.field(default=4, kw_only=True)
    retention_tokens: int | None = attrs.field(default=None, kw_only=True)
    protect: int = attrs.field(default=0, kw_only=True)
    gapless: bool = attrs.field(default=False, kw_only=True)

    def _parts(self) -> Parts:
        selector = SinkAndRecentSelector(
            self.retention_rate,
            num_sinks=self.num_sinks,
            retention_tokens=self.retention_tokens,
            protect=self.protect,
        )
        return None, selector, PassAllPropagation()
