"""Policies and bounds of answers of the table of situations, with their references."""

from typing import Any

import attrs

from kvpolicy import CachePolicy, DecodingEviction
from kvpolicy.policies import H2O, RKV, TOVA, KeyDiff, SnapKV, StreamingLLM
from tests import reference
from tests.integrations.forward.test_gapless import METHODS as UNGAPPED
from tests.integrations.forward.test_together import METHODS as CHOOSING_TOGETHER
from tests.integrations.fuzz.drawn_methods import Ranked, SinksHeld
from tests.integrations.support.bounded_row import Bound
from tests.integrations.support.conversation import METHODS
from tests.reference.decoding import Summed

GAPLESS: dict[str, tuple[CachePolicy, Any]] = {"gapless_snapkv": UNGAPPED["snapkv"]}
TOGETHER: dict[str, tuple[CachePolicy, Any]] = {
    name: CHOOSING_TOGETHER[name] for name in ("threshold", "kvzip")
}
# Of every way to score, to choose and to pass on one; test_against_reference.py has all methods.
_NAMES = (
    *("full_context", "streamingllm", "snapkv", "h2o", "tova", "keydiff", "adakv", "fastkv"),
    *("two_stages", "gemfilter", "pyramidinfer", "claa", "expected_attention"),
    "criticalkv",
)
POLICIES: dict[str, tuple[CachePolicy, Any]] = {
    **{name: METHODS[name] for name in _NAMES},
    **GAPLESS,
    **TOGETHER,
}

# So few tokens, and so often, that layers choose several times in an answer.
TOKENS, EVERY = 12, 2
BOUNDS: dict[str, tuple[DecodingEviction, Bound]] = {
    "rolling": (
        StreamingLLM(num_sinks=2).decoding_rule(TOKENS, EVERY),
        Bound(SinksHeld((None, TOKENS), 2, 0), EVERY, 0),
    ),
    "sums": (
        H2O(window_size=2).decoding_rule(TOKENS, EVERY),
        Bound(Ranked(Summed(), (None, TOKENS), 2, 0), EVERY, 0),
    ),
    "last": (
        TOVA().decoding_rule(TOKENS),
        Bound(Ranked(reference.TOVA(), (None, TOKENS), 1, 0), 1, 1),
    ),
    "window": (  # which reaches back behind the last choice
        SnapKV(window_size=5, kernel_size=3).decoding_rule(TOKENS, EVERY),
        Bound(reference.SnapKV(None, 5, 3, TOKENS), EVERY, 5),
    ),
    "unlike": (
        KeyDiff(window_size=2).decoding_rule(TOKENS, EVERY),
        Bound(Ranked(reference.KeyDiff(), (None, TOKENS), 2, 0), EVERY, 0),
    ),
    "redundancy": (
        RKV(window_size=3, kernel_size=3).decoding_rule(TOKENS, EVERY),
        Bound(reference.RKV(None, 3, 3, retention_tokens=TOKENS), EVERY, 3),
    ),
}


def policy_of(name: str, bound: str) -> CachePolicy:
    """Returns a policy, under a bound of answers unless that is "none"."""
    policy = POLICIES[name][0]
    return policy if bound == "none" else attrs.evolve(policy, decoding=BOUNDS[bound][0])


def method_of(name: str, bound: str) -> Any:
    """Returns the reference of `policy_of`, which behind a bounded answer goes by other things."""
    method = POLICIES[name][1]
    if bound == "none":
        return method
    if bound == "sums" and name == "h2o":  # a later prompt is cut by the sums as well
        return Ranked(Summed(), (0.4, None), 2, 0)
    if isinstance(method, reference.StreamingLLM):  # the first held, not the row's first
        amount = method.retention_rate, method.retention_tokens
        return SinksHeld(amount, method.num_sinks, method.protect)
    return method
