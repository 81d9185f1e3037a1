"""KVzip (arXiv 2505.23416)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import attrs

from kvpolicy.budgets import DefaultRate
from kvpolicy.checks import check_count, check_kind
from kvpolicy.decoding import DecodingEviction
from kvpolicy.interfaces import KVSelector
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.scorers.peak import PeakAttentionScorer
from kvpolicy.policies.selectors.global_threshold import GlobalThresholdSelector
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
from kvpolicy.repetition import Repetition
from kvpolicy.short_repr import brief


def _ids(given: Iterable[int]) -> tuple[int, ...]:
    return tuple(given)


@documented
@attrs.frozen
class KVzip(Method):
    """Keeps what the model attends to when it repeats the prompt; no question is needed for it.

    After the prefill, which is complete, the prompt is read again in chunks, see `Repetition`.
    A token matters to a KV head as much as it is attended to at most: see `PeakAttentionScorer`.
    One threshold over all layers and heads decides what stays (`GlobalThresholdSelector`). What is
    kept serves any question asked later; reading the prompt costs two to three times as much, and
    at the peak every layer holds all of it.

    Args:
        retention_rate: Fraction of the context that layers and heads keep on average, in (0, 1].
        chunk_size: Tokens of the prompt that are repeated at a time, at least 1.
        num_sinks: First tokens of the context, which every layer keeps, at least 0.
        window_size: Last tokens that are always kept, at least 0.
        overlap: Last tokens of the chunk before that a chunk is repeated behind, at least 0.
        instruction_ids: Ids of an instruction to repeat the context, which stands before every
            chunk; none by default, since a policy knows no tokenizer.
        head_uniform: Whether every KV head of every layer keeps the same number of tokens.
        retention_tokens: Number of tokens that layers and heads keep on average, at least 1, in
            place of the rate.
        decoding: A `DecodingEviction`, by which every layer stays bounded while an answer is
            decoded; None lets it grow.

    Example:
        >>> KVzip(retention_rate=0.2).prefill_compute_rate(num_layers=32, context_len=4096)
        2.001953125
        >>> tokenizer_ids = [5, 6]
        >>> KVzip(instruction_ids=tokenizer_ids).reading.instruction_ids
        (5, 6)

    Source: KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction (arXiv
    2505.23416). Its code scores in half precision and instructs in words; those of `Repetition`
    are its own, for a composition with a reading of one's own. Its context ends before the chat
    template's last tokens, which are never evicted; here they are part of the prompt.
    """

    paper: ClassVar[str] = "arXiv 2505.23416"

    retention_rate: float | None = DefaultRate(0.3)
    chunk_size: int = 2048
    num_sinks: int = 4
    window_size: int = 0
    overlap: int = attrs.field(default=8, kw_only=True)
    instruction_ids: tuple[int, ...] = attrs.field(default=(), kw_only=True, converter=_ids)
    head_uniform: bool = attrs.field(default=False, kw_only=True)
    retention_tokens: int | None = attrs.field(default=None, kw_only=True)

    def __str__(self) -> str:
        return brief(self)

    def _parts(self) -> Parts:
        check_count("num_sinks", self.num_sinks)
        check_kind("head_uniform", self.head_uniform, bool)
        kind: type[GlobalThresholdSelector] | type[GQAGroupSelector]
        kind = GQAGroupSelector if self.head_uniform else GlobalThresholdSelector
        selector: KVSelector = kind(
            self.retention_rate, self.window_size, self.retention_tokens, protect=self.num_sinks
        )
        return PeakAttentionScorer(), selector, PassAllPropagation()

    def _reading(self) -> Repetition:
        return Repetition(
            self.chunk_size,
            num_sinks=self.num_sinks,
            overlap=self.overlap,
            instruction_ids=self.instruction_ids,
        )

    def decoding_rule(self, tokens: int, every: int | None = None) -> DecodingEviction:
        """Raise: a prompt that grows is not read again.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "decoding of KVzip must be a DecodingEviction or None, since a context that grows is "
            f"not read a second time at every choice, got {tokens}"
        )
