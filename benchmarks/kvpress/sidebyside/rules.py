"""Build policies that follow kvpress's rules, so that both libraries keep the same positions.

If the positions still differ, another difference than the rule is the reason. Each rule follows the
press of its name in kvpress 0.5.5; see `press_scorers` and `press_selectors`.
"""

from __future__ import annotations

from typing import Any

from kvpolicy import CachePolicy, Repetition
from kvpolicy.policies import (
    CriticalSelector,
    CurDKV,
    ExpectedAttention,
    GQAGroupSelector,
    KeyDiff,
    KeyNorm,
    PassAllPropagation,
    PeakAttentionScorer,
    StreamingLLM,
    SumScorer,
    WindowMeanPoolScorer,
)

from . import press_scorers as scorers
from . import press_selectors as selectors
from .reading import REPETITION, Settings


def as_kvpress(method: str, settings: Settings) -> CachePolicy:
    """Return the policy that keeps the same tokens as a press."""
    rate = settings["rate"]
    named: dict[str, CachePolicy] = {
        "streamingllm": StreamingLLM(rate, num_sinks=settings["num_sinks"]),
        "keydiff": KeyDiff(rate, window_size=0),
        "key_norm": KeyNorm(rate, window_size=0),
        "curdkv": CurDKV(rate, window_size=0),
        "expected_attention": ExpectedAttention(rate, window_size=0),
    }
    if method in named:
        return named[method]
    if method == "kvzip":
        return CachePolicy(
            PeakAttentionScorer(),
            selectors.PressThresholdSelector(rate, window_size=0, protect=settings["num_sinks"]),
            PassAllPropagation(),
            rereading=Repetition(**REPETITION),
        )
    scorer, selector = _parts(method, settings)
    return CachePolicy(scorer, selector, PassAllPropagation())


def _parts(method: str, settings: Settings) -> tuple[Any, Any]:
    rate, size = settings["rate"], settings["window_size"]
    window = WindowMeanPoolScorer(size, kernel_size=settings["kernel_size"])
    epsilon = size * 1e-4  # kvpress takes the mean over the window, kvpolicy the sum
    every_key, but_window = (
        GQAGroupSelector(rate, window_size=0),
        GQAGroupSelector(rate, window_size=size),
    )
    heads = selectors.PressAdaptiveSelector(rate, window_size=size)
    compactor = SumScorer(
        [scorers.DrawnLeverageScorer(), scorers.ZeroPaddedChunkScorer()], weights=[1 - rate, 1.0]
    )
    parts: dict[str, tuple[Any, Any]] = {
        "snapkv": (window, but_window),
        "pyramidkv": (window, selectors.PressPyramidSelector(rate, window_size=size)),
        "adakv": (window, heads),
        "chunkkv": (window, selectors.PressChunkSelector(rate, window_size=size)),
        "criticalkv": (window, CriticalSelector(but_window, epsilon=epsilon)),
        "critical_ada_kv": (window, selectors.PressCriticalAdaSelector(heads, epsilon=epsilon)),
        "h2o": (scorers.MeanAttentionScorer(), every_key),
        "tova": (scorers.AllHeadsLastQueryScorer(), GQAGroupSelector(rate, window_size=1)),
        "lagkv": (scorers.TiedLagScorer(), selectors.TopKSelector(rate, window_size=0)),
        "leverage": (scorers.DrawnLeverageScorer(num_sinks=0, window_size=0), every_key),
        "chunk_attention": (scorers.ZeroPaddedChunkScorer(num_sinks=0, window_size=0), every_key),
        "compactor": (compactor, GQAGroupSelector(rate, window_size=4, protect=8)),
    }
    return parts[method]
