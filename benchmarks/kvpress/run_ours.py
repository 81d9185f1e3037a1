"""The worker of kvpolicy, in the project's environment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from sidebyside.reading import REPETITION, Kept, Library, Reading, Settings
from sidebyside.rules import as_kvpress
from sidebyside.serving import serve
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, Repetition
from kvpolicy.budgets import Budget
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    H2O,
    TOVA,
    AdaKV,
    AdaptiveHeadSelector,
    ChunkAttentionScorer,
    ChunkKV,
    Compactor,
    CriticalKV,
    CriticalSelector,
    CurDKV,
    ExpectedAttention,
    GlobalThresholdSelector,
    GQAGroupSelector,
    KeyDiff,
    KeyNorm,
    LagKV,
    LeverageScorer,
    PassAllPropagation,
    PeakAttentionScorer,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    WindowMaxPoolScorer,
)

AS_KVPRESS = ":as_kvpress"
"""The suffix of a method's name that asks for kvpress's rule."""


def build_policy(method: str, settings: Settings) -> CachePolicy:
    """Return the policy of a method, with the parameters that both libraries share."""
    if method.endswith(AS_KVPRESS):
        return as_kvpress(method.removesuffix(AS_KVPRESS), settings)
    rate = settings["rate"]
    window = {"window_size": settings["window_size"], "kernel_size": settings["kernel_size"]}
    policies: dict[str, CachePolicy] = {
        "snapkv": SnapKV(rate, **window),
        "pyramidkv": PyramidKV(rate, **window),
        "streamingllm": StreamingLLM(rate, num_sinks=settings["num_sinks"]),
        "h2o": H2O(rate),
        "tova": TOVA(rate),
        "keydiff": KeyDiff(rate),
        "key_norm": KeyNorm(rate),
        "adakv": AdaKV(rate, **window),
        "lagkv": LagKV(rate),
        "curdkv": CurDKV(rate),
        "chunkkv": ChunkKV(rate, **window, chunk_size=20),
        "expected_attention": ExpectedAttention(rate),
        "compactor": Compactor(rate),
        "criticalkv": CriticalKV(rate, **window),
    }
    return policies.get(method) or composed(method, settings)


def composed(method: str, settings: Settings) -> CachePolicy:
    """Return a composition that does what a press does, where kvpolicy has no named method."""
    rate, size = settings["rate"], settings["window_size"]
    everything = PassAllPropagation()
    if method == "kvzip":
        threshold = GlobalThresholdSelector(rate, window_size=0, protect=settings["num_sinks"])
        reading = Repetition(**REPETITION)
        return CachePolicy(PeakAttentionScorer(), threshold, everything, rereading=reading)
    if method == "critical_ada_kv":
        scorer = WindowMaxPoolScorer(size, kernel_size=settings["kernel_size"])
        selector = CriticalSelector(AdaptiveHeadSelector(rate, window_size=size))
        return CachePolicy(scorer, selector, everything)
    scorers = {
        "leverage": LeverageScorer(num_sinks=0, window_size=0),
        "chunk_attention": ChunkAttentionScorer(num_sinks=0, window_size=0),
    }
    return CachePolicy(scorers[method], GQAGroupSelector(rate, window_size=0), everything)


class PolicyReading(Reading):
    """A model with a `PolicyCache`."""

    def __init__(self, model: PreTrainedModel, policy: CachePolicy) -> None:
        super().__init__(model)
        self.cache = PolicyCache(policy)

    def prefilling(self) -> AbstractContextManager[Any]:
        """Attach the cache."""
        attached: AbstractContextManager[Any] = self.cache.attached(self.model)
        return attached

    def decoding(self) -> AbstractContextManager[Any]:
        """Attach the cache, as for the prompt."""
        return self.prefilling()

    def generating(self) -> AbstractContextManager[Any]:
        """Return an empty context manager, since ``generate`` attaches the cache."""
        return nullcontext()

    def start_turn(self) -> None:
        """Start a new conversation turn of the cache; see `PolicyCache`."""
        self.cache.start_turn()

    def kept(self, lengths: Sequence[int]) -> Kept:
        """Return the positions that the policy kept, appended tokens left out."""
        return [
            [
                [[place for place in head if 0 <= place < length] for head in row]
                for row, length in zip(layer.positions.tolist(), lengths, strict=True)
            ]
            for layer in self.cache.layers
        ]


class Kvpolicy(Library):
    """The kvpolicy library."""

    packages: ClassVar[tuple[str, ...]] = ("kvpolicy", "transformers")

    def begin_method(
        self, model: PreTrainedModel, method: str, settings: Settings, *, watched: bool
    ) -> Reading:
        """Return the reading of a prompt under the method's policy; see `Library.begin_method`."""
        return PolicyReading(model, build_policy(method, settings))

    def count(self, length: int, rate: float) -> int:
        """Return the number of tokens that kvpolicy keeps: ``int(length * rate)``, at least 1."""
        return Budget(rate=rate).count(seen_len=length, available=length, protected=0)


if __name__ == "__main__":
    serve(Kvpolicy())
