"""SnapKV (arXiv 2404.14469)."""

import attrs

from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import WindowEvictionMethod


@documented
@attrs.frozen
class SnapKV(WindowEvictionMethod):
    """Keeps what the last tokens of the prompt attend to; prefill is complete.

    Every layer keeps the observation window and, per KV head, the tokens before it with the
    highest window saliency (see `WindowMaxPoolScorer`), averaged over the KV group.

    Args:
        window_size: Tokens of the observation window, at least 1.

    Example:
        >>> SnapKV(retention_rate=0.2).num_queries
        8

    Source: SnapKV: LLM Knows What You are Looking for Before Generation (arXiv 2404.14469).
    Its code selects and stores tokens per query head; this class selects per KV head.
    """

    paper = "arXiv 2404.14469"
