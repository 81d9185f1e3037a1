"""Rules by which drawn policies evict while they decode, with their references."""

import dataclasses

import attrs
from hypothesis import strategies as st

from kvpolicy import CachePolicy, DecodingEviction, policies
from tests import reference
from tests.integrations.fuzz.drawn_methods import KeyNorm, Random, Ranked, SinksHeld
from tests.integrations.fuzz.drawn_policies import KERNELS, PROTECTS, WINDOWS, keeping
from tests.integrations.support.bounded_row import Bound
from tests.reference import Method
from tests.reference.decoding import Summed

Rule = tuple[DecodingEviction, Bound]
Bounded = tuple[CachePolicy, Method, Bound]

# So small that layers choose several times in an answer, and seldom keep all they hold.
TOKENS = st.integers(1, 24)
EVERY = st.sampled_from([3, 1, 2, 5, 8])
SUMS = policies.AccumulatedAttentionScorer()


@st.composite
def bounded(draw: st.DrawFn, policy: CachePolicy, method: Method) -> Bounded:
    """A policy under any of the rules, with the references of both."""
    eviction, bound = draw(st.one_of(rolling(), scored(), tova(), r_kv(), composed()))
    if policy.scorer == eviction.scorer == SUMS and isinstance(method, Ranked):
        # What a later prompt is cut by are the sums as well.
        method = dataclasses.replace(method, scored=Summed())
    if isinstance(method, reference.StreamingLLM):
        # Sinks are the first that a layer holds, which need no longer be the row's first.
        amount = method.retention_rate, method.retention_tokens
        method = SinksHeld(amount, method.num_sinks, method.protect)
    return attrs.evolve(policy, decoding=eviction), method, bound


@st.composite
def rolling(draw: st.DrawFn) -> Rule:
    tokens, every = draw(TOKENS), draw(EVERY)
    sinks, protect = draw(st.integers(0, 4)), draw(PROTECTS)
    rule = policies.StreamingLLM(num_sinks=sinks, protect=protect).decoding_rule(tokens, every)
    return rule, Bound(SinksHeld((None, tokens), sinks, protect), every, 0)


@st.composite
def scored(draw: st.DrawFn) -> Rule:
    """The rules of methods that rank tokens by a score of each."""
    known = {
        "H2O": (Summed(), 0),
        "TOVA": (reference.TOVA(), 1),
        "KeyDiff": (reference.KeyDiff(), 0),
        "KeyNorm": (KeyNorm(), 0),
        "Random": (Random(seed=3), 0),
    }
    name = draw(st.sampled_from(["H2O", "H2O", "KeyDiff", "TOVA", "KeyNorm", "Random"]))
    tokens, every, window, protect = draw(TOKENS), draw(EVERY), draw(WINDOWS), draw(PROTECTS)
    more = {"seed": 3} if name == "Random" else {}
    policy = getattr(policies, name)(window_size=window, protect=protect, **more)
    score, observers = known[name]
    ranked = Ranked(score, (None, tokens), window, protect)
    return policy.decoding_rule(tokens, every), Bound(ranked, every, observers)


@st.composite
def tova(draw: st.DrawFn) -> Rule:
    """As it is: of what the last token attends to, one entry goes at every step."""
    tokens, protect = draw(TOKENS), draw(PROTECTS)
    ranked = Ranked(reference.TOVA(), (None, tokens), 1, protect)
    return policies.TOVA(protect=protect).decoding_rule(tokens), Bound(ranked, 1, 1)


@st.composite
def r_kv(draw: st.DrawFn) -> Rule:
    tokens, every, window = draw(TOKENS), draw(EVERY), draw(WINDOWS)
    how = {
        "kernel_size": draw(KERNELS),
        "importance": draw(st.sampled_from([0.1, 0.0, 0.5])),
        "protect": draw(PROTECTS),
    }
    rule = policies.RKV(window_size=window, **how).decoding_rule(tokens, every)
    return rule, Bound(reference.RKV(None, window, retention_tokens=tokens, **how), every, window)


@st.composite
def composed(draw: st.DrawFn) -> Rule:
    """What the last queries attend to, under any selector with a budget in tokens: SnapKV's too."""
    tokens, every, window, kernel = draw(TOKENS), draw(EVERY), draw(WINDOWS), draw(KERNELS)
    pairs = keeping((None, tokens), window, kernel)
    selector, method = draw(pairs.filter(lambda pair: pair[0].is_bounded))
    scorer = policies.WindowMaxPoolScorer(window, kernel_size=kernel)
    return DecodingEviction(scorer, selector, every=every), Bound(method, every, window)
