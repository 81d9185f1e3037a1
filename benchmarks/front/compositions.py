"""The compared policies: named methods, and compositions of dropper, scorer and selector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs

from kvpolicy import CachePolicy, KVSelector, PropagationPolicy, Scorer
from kvpolicy import build as build_method
from kvpolicy.errors import UnknownPolicyError
from kvpolicy.policies import (
    AccumulatedAttentionScorer,
    AdaptiveHeadSelector,
    AgreementPropagation,
    BlockMassPropagation,
    CAOTEScorer,
    CriticalSelector,
    CrossLayerPropagation,
    ExpectedAttentionScorer,
    GQAGroupSelector,
    KeyDiffScorer,
    PassAllPropagation,
    PyramidSelector,
    TokenSelectivePropagation,
    ValueAwareScorer,
    WindowAttentionScorer,
    WindowMaxPoolScorer,
)

FULL = "full_context"
FASTKV = "fastkv"


@attrs.frozen
class Looks:
    """A scorer, and the number of last tokens that its selector always keeps."""

    scorer: Scorer
    window: int


# "open": the last eight queries observe, and their tokens compete with the others for places.
SCORERS = {
    "window8": Looks(WindowMaxPoolScorer(8, kernel_size=7), 8),
    "window4": Looks(WindowMaxPoolScorer(4, kernel_size=7), 4),
    "window2": Looks(WindowMaxPoolScorer(2, kernel_size=7), 2),
    "open8": Looks(WindowAttentionScorer(8, kernel_size=7), 1),
    "open4": Looks(WindowAttentionScorer(4, kernel_size=7), 1),
    "open8-k3": Looks(WindowAttentionScorer(8, kernel_size=3), 1),
    "open8-values": Looks(ValueAwareScorer(WindowAttentionScorer(8, kernel_size=7)), 1),
    "open8-caote": Looks(CAOTEScorer(WindowAttentionScorer(8, kernel_size=7)), 1),
    "h2o": Looks(AccumulatedAttentionScorer(), 1),
    "keydiff": Looks(KeyDiffScorer(), 1),
    "expected": Looks(ExpectedAttentionScorer(), 1),
}


def _gqa(rate: float, window: int) -> KVSelector:
    return GQAGroupSelector(rate, window_size=window)


def _ada(rate: float, window: int) -> KVSelector:
    return AdaptiveHeadSelector(rate, window_size=window)


def _pyramid(rate: float, window: int) -> KVSelector:
    return PyramidSelector(rate, window_size=window)


def _critical(rate: float, window: int) -> KVSelector:
    return CriticalSelector(GQAGroupSelector(rate, window_size=window))


SELECTORS: dict[str, Callable[[float, int], KVSelector]] = {
    "gqa": _gqa,
    "ada": _ada,
    "pyramid": _pyramid,
    "critical": _critical,
}


def _nothing(window: int) -> PropagationPolicy:
    return PassAllPropagation()


def _tsp(rate: float) -> Callable[[int], PropagationPolicy]:
    return lambda window: TokenSelectivePropagation(tsp_rate=rate, window_size=window)


def _votes(rate: float) -> Callable[[int], PropagationPolicy]:
    return lambda window: CrossLayerPropagation(tsp_rate=rate, window_size=window, voting_layers=2)


def _agree(rate: float, agreement: float) -> Callable[[int], PropagationPolicy]:
    return lambda window: AgreementPropagation(rate, window_size=window, agreement=agreement)


def _mass(mass: float) -> Callable[[int], PropagationPolicy]:
    return lambda window: BlockMassPropagation(
        tsp_layers=None, mass=mass, chunk_size=1, protect=0, window_size=window
    )


DROPPERS: dict[str, Callable[[int], PropagationPolicy]] = {
    "none": _nothing,
    "tsp.2": _tsp(0.2),
    "tsp.1": _tsp(0.1),
    "votes.2": _votes(0.2),
    "votes.1": _votes(0.1),
    "agree.2": _agree(0.2, 0.5),
    "agree.1": _agree(0.1, 0.5),
    "mass.9": _mass(0.9),
    "mass.7": _mass(0.7),
}


def _policy(part: object) -> CachePolicy:
    assert isinstance(part, CachePolicy)
    return part


@attrs.frozen
class Composition:
    """A composition of parts: one policy for each retention rate.

    Args:
        name: A method's, or ``dropper/scorer/selector``.
        at: Returns the policy that keeps a rate; None if there is none at that rate.
    """

    name: str
    at: Callable[[float], CachePolicy | None]


def composed(dropper: str, scorer: str, selector: str) -> Composition:
    """Return a composition of named parts of this module."""
    looks = SCORERS[scorer]

    def at(rate: float) -> CachePolicy | None:
        try:
            return CachePolicy(
                looks.scorer,
                SELECTORS[selector](rate, looks.window),
                DROPPERS[dropper](looks.window),
            )
        except ValueError:  # more is to be kept than goes on
            return None

    return Composition(f"{dropper}/{scorer}/{selector}", at)


# CLAA's default of four whole layers would be most of a model of six layers.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "claa": {"whole_layers": 0},
    "replaykv+drop": {"tsp_rate": 0.25},
    "replaykv+uniform": {"head_uniform": True},
    "kvzip+uniform": {"head_uniform": True},
}


def method(name: str) -> Composition:
    """Return a named method as a composition, with its defaults and `ARGUMENTS`.

    Args:
        name: The method's, and behind a "+" what distinguishes its arguments.
    """
    others, registered_name = ARGUMENTS.get(name, {}), name.partition("+")[0]

    def at(rate: float) -> CachePolicy | None:
        try:
            return _policy(build_method(registered_name, retention_rate=rate, **others))
        except TypeError:  # takes no rate
            return _policy(build_method(registered_name, **others))
        except UnknownPolicyError:
            raise
        except ValueError:  # none at this rate
            return None

    return Composition(name, at)


METHODS = (
    FULL, FASTKV, "snapkv", "pyramidkv", "adakv", "h2o", "tova", "keydiff", "streamingllm",
    "gemfilter", "pyramidinfer", "lagkv", "curdkv", "chunkkv", "claa", "uniprefill",
    "promptdistill", "lazyllm", "expected_attention", "compactor", "criticalkv", "kvzip",
    "replaykv", "replaykv+drop", "replaykv+uniform", "kvzip+uniform", "spirekv", "random",
)  # fmt: skip
# Scorers alone, selectors on the best scorers, droppers, and combinations of the best of each.
GRID = (
    *(("none", scorer, "gqa") for scorer in SCORERS),
    *(("none", scorer, name) for scorer in ("window4", "open8") for name in SELECTORS),
    *((dropper, scorer, "gqa") for dropper in DROPPERS for scorer in ("window8", "open8")),
    *(
        (dropper, scorer, selector)
        for dropper in ("tsp.2", "tsp.1", "votes.1", "agree.1")
        for scorer in ("window4", "open8", "open8-values")
        for selector in ("gqa", "ada", "pyramid")
    ),
)


def compositions(known: frozenset[str]) -> Iterator[Composition]:
    """Yield all compositions that are compared, without repeats.

    Args:
        known: Names of the methods that are registered.
    """
    yield from (method(name) for name in METHODS if name.partition("+")[0] in known)
    yield from (composed(*names) for names in dict.fromkeys(GRID))
