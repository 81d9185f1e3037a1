"""Concrete scorers, selectors and propagation policies, and the named methods made of them."""

from kvpolicy.policies.budget_methods import AdaKV, PyramidKV
from kvpolicy.policies.combined_scorers import MaxScorer, SumScorer, ValueAwareScorer
from kvpolicy.policies.gem_filter import GemFilter, LastQueryProductScorer, RestartPropagation
from kvpolicy.policies.key_scorers import KeyDiffScorer, KeyNormScorer, RandomScorer
from kvpolicy.policies.layer_budgets import AdaptiveHeadSelector, PyramidSelector
from kvpolicy.policies.methods import H2O, FastKV, FullContext, SnapKV, StreamingLLM
from kvpolicy.policies.more_methods import TOVA, KeyDiff, KeyNorm, Random
from kvpolicy.policies.propagation import PassAllPropagation, TokenSelectivePropagation
from kvpolicy.policies.pyramid import PyramidInfer, PyramidPropagation, WeightedTailScorer
from kvpolicy.policies.scorers import (
    AccumulatedAttentionScorer,
    LastQueryScorer,
    WindowMaxPoolScorer,
)
from kvpolicy.policies.selectors import (
    GQAGroupSelector,
    KeepAllSelector,
    SinkAndRecentSelector,
)
from kvpolicy.policies.staged import StagedPropagation

__all__ = [
    "H2O",
    "TOVA",
    "AccumulatedAttentionScorer",
    "AdaKV",
    "AdaptiveHeadSelector",
    "FastKV",
    "FullContext",
    "GQAGroupSelector",
    "GemFilter",
    "KeepAllSelector",
    "KeyDiff",
    "KeyDiffScorer",
    "KeyNorm",
    "KeyNormScorer",
    "LastQueryProductScorer",
    "LastQueryScorer",
    "MaxScorer",
    "PassAllPropagation",
    "PyramidInfer",
    "PyramidKV",
    "PyramidPropagation",
    "PyramidSelector",
    "Random",
    "RandomScorer",
    "RestartPropagation",
    "SinkAndRecentSelector",
    "SnapKV",
    "StagedPropagation",
    "StreamingLLM",
    "SumScorer",
    "TokenSelectivePropagation",
    "ValueAwareScorer",
    "WeightedTailScorer",
    "WindowMaxPoolScorer",
]
