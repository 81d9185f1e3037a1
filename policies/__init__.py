"""Concrete scorers, selectors and propagation policies, and the named methods made of them."""

from kvpolicy.policies.methods import FastKV, FullContext, SnapKV, StreamingLLM
from kvpolicy.policies.propagation import PassAllPropagation, TokenSelectivePropagation
from kvpolicy.policies.scorers import WindowMaxPoolScorer
from kvpolicy.policies.selectors import (
    GQAGroupSelector,
    KeepAllSelector,
    SinkAndRecentSelector,
)

__all__ = [
    "FastKV",
    "FullContext",
    "GQAGroupSelector",
    "KeepAllSelector",
    "PassAllPropagation",
    "SinkAndRecentSelector",
    "SnapKV",
    "StreamingLLM",
    "TokenSelectivePropagation",
    "WindowMaxPoolScorer",
]
