"""KVzip (arXiv 2505.23416)."""

from collections.abc import Iterable

import attrs

from kvpolicy.budgets import DefaultRate
from kvpolicy.checks import as_tuple, check_count, check_kind
from kvpolicy.interfaces import KVSelector
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.scorers.peak import PeakAttentionScorer
from kvpolicy.policies.selectors.first_tokens import FirstTokensWholeSelector
from kvpolicy.policies.selectors.global_threshold import GlobalThresholdSelector
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
from kvpolicy.repetition import Repetition


def _ids(given: Iterable[int]) -> tuple[int, ...]:
    return as_tuple("instruction_ids", "token ids", given)


@documented
@attrs.frozen
class KVzip(Method):
    """Keeps the tokens that the model attends to when it repeats the prompt; needs no question.

    After a complete prefill the prompt is read again in chunks, see `Repetition`. A token's
    saliency is the largest attention that it receives, see `PeakAttentionScorer`. One threshold
    over all layers and heads decides which tokens stay (`GlobalThresholdSelector`). The kept tokens
    serve any question asked later. Reading the prompt costs two to three times as much, and until
    then every layer holds all of it.

    Args:
        retention_rate: Fraction of the context that layers and heads keep on average, in (0, 1].
        chunk_size: Tokens of the prompt that are repeated at a time, at least 1.
        num_sinks: First tokens of the context, which every layer keeps, at least 0.
        window_size: Last tokens that are always kept, at least 0.
        overlap: Last tokens of the previous chunk that are fed before each chunk, at least 0.
        instruction_ids: Ids of an instruction to repeat the context, fed before every chunk; none
            by default, since a policy has no tokenizer.
        head_uniform: Whether every KV head of every layer keeps the same number of tokens.
        whole_tokens: First tokens of the context, such as those of a system prompt, that are not
            repeated and are kept in addition to the budget, which then refers to the later tokens
            (see `FirstTokensWholeSelector`); every softmax includes their keys. At least 0.
        retention_tokens: Number of tokens that layers and heads keep on average, at least 1, in
            place of the rate.
        decoding: A `DecodingEviction`, by which every layer stays bounded while an answer is
            decoded; None lets it grow.

    Example:
        >>> KVzip(retention_rate=0.2).prefill_compute_rate(num_layers=32, context_len=4096)
        2.001953125
        >>> tokenizer_ids = [5, 6]
        >>> KVzip(instruction_ids=tokenizer_ids).rereading.instruction_ids
        (5, 6)

    Source: KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction (arXiv
    2505.23416). Its code scores in half precision, repeats 2,000 tokens at a time, and has an
    instruction in words, which `Repetition.asking` can encode. Its context begins after the system
    prompt, as with ``whole_tokens`` here, and ends before the chat template's last tokens, which it
    never evicts; here they are part of the prompt.
    """

    paper = "arXiv 2505.23416"

    retention_rate: float | None = DefaultRate(0.3)
    chunk_size: int = attrs.field(default=2048, kw_only=True)
    num_sinks: int = attrs.field(default=4, kw_only=True)
    window_size: int = attrs.field(default=0, kw_only=True)
    overlap: int = attrs.field(default=8, kw_only=True)
    instruction_ids: tuple[int, ...] = attrs.field(default=(), kw_only=True, converter=_ids)
    head_uniform: bool = attrs.field(default=False, kw_only=True)
    whole_tokens: int = attrs.field(default=0, kw_only=True)
    retention_tokens: int | None = attrs.field(default=None, kw_only=True)
    prefill_block: None = attrs.field(default=None, init=False, eq=False, repr=False)

    def _parts(self) -> Parts:
        check_count("num_sinks", self.num_sinks)
        check_kind("head_uniform", self.head_uniform, bool)
        check_count("whole_tokens", self.whole_tokens)
        kind: type[GlobalThresholdSelector] | type[GQAGroupSelector]
        kind = GQAGroupSelector if self.head_uniform else GlobalThresholdSelector
        selector: KVSelector = kind(
            self.retention_rate,
            window_size=self.window_size,
            retention_tokens=self.retention_tokens,
            protect=self.num_sinks,
        )
        if self.whole_tokens:
            selector = FirstTokensWholeSelector(selector, whole_tokens=self.whole_tokens)
        return PeakAttentionScorer(), selector, PassAllPropagation()

    def _rereading(self) -> Repetition:
        return Repetition(
            self.chunk_size,
            num_sinks=max(self.num_sinks, self.whole_tokens),
            overlap=self.overlap,
            instruction_ids=self.instruction_ids,
            unrepeated=self.whole_tokens,
        )
