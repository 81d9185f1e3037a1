"""Policies that the fuzzing draws, with their references."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from kvpolicy import CachePolicy, policies
from tests import reference
from tests.integrations.fuzz.drawn_methods import (
    Amount,
    Dropping,
    KeyNorm,
    Random,
    Ranked,
    Restarting,
    SinksHeld,
)
from tests.reference import Method

Pair = tuple[CachePolicy, Method]

RATES = st.sampled_from([0.3, 0.05, 0.1, 0.5, 0.75, 0.95, 1.0])
AMOUNTS: st.SearchStrategy[Amount] = st.one_of(
    RATES.map(lambda rate: (rate, None)), st.integers(1, 30).map(lambda tokens: (None, tokens))
)
WINDOWS = st.integers(1, 6)
KERNELS = st.sampled_from([1, 3, 5, 7])
PROTECTS = st.sampled_from([0, 0, 1, 3, 7])


@st.composite
def ordered_amounts(draw: st.DrawFn) -> tuple[Amount, Amount]:
    """Budgets of what is kept and of what goes on, of which the second is no smaller."""
    first, second = draw(AMOUNTS), draw(AMOUNTS)
    if (first[0] is None) != (second[0] is None):
        return first, second
    low, high = sorted([first, second], key=lambda amount: amount[0] or amount[1])
    return low, high


def named(amount: Amount, prefix: str = "retention") -> dict[str, Any]:
    """A budget as the arguments of a policy."""
    return {f"{prefix}_rate": amount[0], f"{prefix}_tokens": amount[1]}


def full_contexts(num_layers: int) -> st.SearchStrategy[Pair]:
    return st.just((policies.FullContext(), reference.FullContext()))


@st.composite
def streaming(draw: st.DrawFn, num_layers: int) -> Pair:
    amount = {
        **named(draw(AMOUNTS)),
        "num_sinks": draw(st.integers(0, 5)),
        "protect": draw(PROTECTS),
    }
    return policies.StreamingLLM(**amount), reference.StreamingLLM(**amount)


@st.composite
def snapkv_like(draw: st.DrawFn, num_layers: int) -> Pair:
    common = {
        **named(draw(AMOUNTS)),
        "window_size": draw(WINDOWS),
        "kernel_size": draw(KERNELS),
        "protect": draw(PROTECTS),
    }
    name = draw(st.sampled_from(["SnapKV", "PyramidKV", "AdaKV"]))
    if name == "PyramidKV":
        common["beta"] = draw(st.sampled_from([20, 1, 2, 5]))
    if name == "AdaKV":
        common["floor"] = draw(st.sampled_from([0.2, 0.0, 0.5, 1.0]))
    return getattr(policies, name)(**common), getattr(reference, name)(**common)


@st.composite
def ranked(draw: st.DrawFn, num_layers: int) -> Pair:
    scored = {
        "H2O": reference.H2O(),
        "TOVA": reference.TOVA(),
        "KeyDiff": reference.KeyDiff(),
        "KeyNorm": KeyNorm(),
        "Random": Random(seed=3),
    }
    name = draw(st.sampled_from(sorted(scored)))
    amount, protect = draw(AMOUNTS), draw(PROTECTS)
    window = draw(WINDOWS)
    more = {"seed": 3} if name == "Random" else {}
    policy = getattr(policies, name)(**named(amount), window_size=window, protect=protect, **more)
    return policy, Ranked(scored[name], amount, window, protect)


@st.composite
def fastkv(draw: st.DrawFn, num_layers: int) -> Pair:
    kept, passed = draw(ordered_amounts())
    layer = draw(st.integers(0, num_layers - 1))
    if num_layers > 1 and draw(st.booleans()):
        layer = None
    common = {
        **named(kept),
        **named(passed, "tsp"),
        "tsp_layer": layer,
        "window_size": draw(WINDOWS),
        "kernel_size": draw(KERNELS),
        "protect": draw(PROTECTS),
    }
    return policies.FastKV(**common), reference.FastKV(**common)


@st.composite
def gem_filter(draw: st.DrawFn, num_layers: int) -> Pair:
    common = {
        **named(draw(AMOUNTS)),
        "filter_layer": draw(st.none() | st.integers(0, num_layers - 1)),
        "kernel_size": draw(KERNELS),
        "protect": draw(PROTECTS),
    }
    return policies.GemFilter(**common), reference.GemFilter(**common)


@st.composite
def pyramid_infer(draw: st.DrawFn, num_layers: int) -> Pair:
    common = {
        "recent_rate": draw(st.sampled_from([0.2, 0.05, 0.5, 1.0])),
        "decay_ratio": draw(st.sampled_from([0.7, 0.2, 1.0])),
        "distance_weight": draw(st.sampled_from([1.2, 0.5, 3.0])),
        "num_sinks": draw(st.integers(0, 5)),
        "min_context": draw(st.sampled_from([0, 4, 12, 64])),
    }
    return policies.PyramidInfer(**common), reference.PyramidInfer(**common)


@st.composite
def keeping(
    draw: st.DrawFn, amount: Amount, window: int, kernel: int
) -> tuple[policies.GQAGroupSelector, Method]:
    """A selector under the saliency of a window, and its reference."""
    protect = draw(PROTECTS)
    common = {**named(amount), "window_size": window, "protect": protect}
    kind = draw(st.sampled_from(["group", "pyramid", "adaptive", "sinks", "all"]))
    if kind == "all":
        return policies.KeepAllSelector(), reference.FullContext()
    if kind == "sinks":
        sinks = draw(st.integers(0, 4))
        selector = policies.SinkAndRecentSelector(**named(amount), num_sinks=sinks, protect=protect)
        return selector, SinksHeld(amount, sinks, protect)
    selector, method = {
        "group": (policies.GQAGroupSelector, reference.SnapKV),
        "pyramid": (policies.PyramidSelector, reference.PyramidKV),
        "adaptive": (policies.AdaptiveHeadSelector, reference.AdaKV),
    }[kind]
    return selector(**common), method(**common, kernel_size=kernel)


@st.composite
def staged(draw: st.DrawFn, num_layers: int) -> Pair:
    """Drops after several layers, under any selector."""
    window, kernel, protect = draw(WINDOWS), draw(KERNELS), draw(PROTECTS)
    layers = draw(st.sets(st.integers(0, num_layers - 1), min_size=1, max_size=3))
    stages = [(layer, draw(AMOUNTS)) for layer in sorted(layers)]
    kept = draw(AMOUNTS)
    for _, amount in stages:
        if (amount[0] is None) == (kept[0] is None):
            kept = min(kept, amount, key=lambda each: each[0] or each[1])
    selector, keeps = draw(keeping(kept, window, kernel))
    parts = [
        policies.TokenSelectivePropagation(
            tsp_layer=layer, **named(amount, "tsp"), window_size=window, protect=protect
        )
        for layer, amount in stages
    ]
    policy = CachePolicy(
        policies.WindowMaxPoolScorer(window, kernel_size=kernel),
        selector,
        policies.StagedPropagation(parts),
    )
    observes = reference.SnapKV(window_size=window, kernel_size=kernel, protect=protect)
    return policy, Dropping(keeps, observes, tuple(stages))


@st.composite
def restarting(draw: st.DrawFn, num_layers: int) -> Pair:
    """A restart by the saliency of a window, after which layers evict."""
    window, kernel, protect = draw(WINDOWS), draw(KERNELS), draw(PROTECTS)
    kept, passed = draw(ordered_amounts())
    layer = draw(st.integers(0, num_layers - 1))
    selector, keeps = draw(keeping(kept, window, kernel))
    policy = CachePolicy(
        policies.WindowMaxPoolScorer(window, kernel_size=kernel),
        selector,
        policies.RestartPropagation(
            filter_layer=layer, **named(passed), window_size=window, protect=protect
        ),
    )
    observes = reference.SnapKV(window_size=window, kernel_size=kernel, protect=protect)
    return policy, Restarting(layer, passed[0], kernel, passed[1], keeps=keeps, observes=observes)


KINDS: dict[str, Callable[[int], st.SearchStrategy[Pair]]] = {
    "full_context": full_contexts,
    "streaming": streaming,
    "snapkv_like": snapkv_like,
    "ranked": ranked,
    "fastkv": fastkv,
    "gemfilter": gem_filter,
    "pyramidinfer": pyramid_infer,
    "staged": staged,
    "restarting": restarting,
}
