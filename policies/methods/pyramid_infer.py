"""PyramidInfer (arXiv 2405.12532)."""

import attrs

from kvpolicy.checks import check_count
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.pyramid import PyramidPropagation
from kvpolicy.policies.scorers.weighted_tail import WeightedTailScorer
from kvpolicy.policies.selectors.keep_all import KeepAllSelector


@documented
@attrs.frozen
class PyramidInfer(Method):
    """Drops a little of the context after every layer; layers keep all tokens that reach them.

    Args:
        recent_rate: Fraction of the context that is the tail, in (0, 1]; the tail's queries score
            the other tokens, and its tokens are never dropped.
        decay_ratio: Fraction of the tokens before the tail that go on after the last layers, in
            (0, 1]; after the first layers nearly all go on.
        distance_weight: Weight of the tail's last query relative to its first, above 0.
        num_sinks: First tokens that always stay, at least 0.
        min_context: Tokens before the tail below which nothing is dropped, at least 0.

    Example:
        >>> round(PyramidInfer(decay_ratio=0.75).prefill_compute_rate(num_layers=36), 2)
        0.6

    Source: PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference
    (arXiv 2405.12532), with the settings of FastKV's comparison. Its authors' configuration for
    Llama 3 has 0.9 for ``decay_ratio``, and evicts while it generates.
    """

    paper = "arXiv 2405.12532"

    recent_rate: float = attrs.field(default=0.2, kw_only=True)
    decay_ratio: float = attrs.field(default=0.7, kw_only=True)
    distance_weight: float = attrs.field(default=1.2, kw_only=True)
    num_sinks: int = attrs.field(default=4, kw_only=True)
    min_context: int = attrs.field(default=64, kw_only=True)

    def _parts(self) -> Parts:
        check_count("num_sinks", self.num_sinks)
        scorer = WeightedTailScorer(
            recent_rate=self.recent_rate, distance_weight=self.distance_weight
        )
        propagation = PyramidPropagation(
            recent_rate=self.recent_rate,
            decay_ratio=self.decay_ratio,
            protect=self.num_sinks,
            min_context=self.min_context,
        )
        return scorer, KeepAllSelector(), propagation
