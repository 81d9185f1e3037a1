"""Every rule that evicts while an answer is decoded, with its reference."""

from typing import Any

import attrs

from kvpolicy.policies import H2O, RKV, TOVA, FullContext, KeyDiff, SnapKV, StreamingLLM
from kvpolicy.policies.methods.method import Method
from tests.reference import decoding as slow
from tests.reference import methods as slow_methods

TOKENS, EVERY, PROMPT_TOKENS = 32, 37, 40


def bounded(
    method: type[Method], tokens: int = TOKENS, every: int = EVERY, **arguments: Any
) -> Method:
    """A method that bounds an answer by its own rule, and keeps the prompt whole."""
    return FullContext(decoding=method(**arguments).decoding_rule(tokens, every))


# By name, the rule as the library has it, and as the reference does.
RULES: dict[str, tuple[Method, slow.Rule]] = {
    "streamingllm": (bounded(StreamingLLM), slow.Rolling(TOKENS)),
    "h2o": (bounded(H2O), slow.RunningSums(TOKENS)),
    "tova": (bounded(TOVA), slow.LastAttention(TOKENS)),
    "snapkv": (bounded(SnapKV), slow.Window(TOKENS)),
    "keydiff": (bounded(KeyDiff), slow.Unlike(TOKENS)),
    "rkv": (bounded(RKV), slow.Redundancy(TOKENS)),
}
KEEPING_ALL = slow_methods.FullContext()


def with_every(policy: Method, every: int) -> Method:
    """The same with another number of tokens from one choice to the next."""
    assert policy.decoding is not None
    return attrs.evolve(policy, decoding=attrs.evolve(policy.decoding, every=every))
