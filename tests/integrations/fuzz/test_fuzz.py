"""Drawn conversations: models, policies, batches and what happens to a cache, in any order.

`make fuzz` goes on for FUZZ_MINUTES, with other conversations every time, and shrinks those that
fail, which takes minutes; without it they are the same every time, and are shown as they are.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from torch import Tensor

from kvpolicy import CachePolicy, policies
from kvpolicy.errors import ShapeError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.forward import decoding, selecting
from kvpolicy.integrations.transformers.forward.passes import PassState
from kvpolicy.integrations.transformers.state.recent_queries import RecentQueries
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policies import GemFilter
from tests import reference
from tests.integrations.fuzz import kinds_machine
from tests.integrations.fuzz.drawing import Drawn, built
from tests.integrations.fuzz.drawn_methods import Ranked
from tests.integrations.fuzz.drawn_policies import KINDS
from tests.integrations.fuzz.machine import Conversation
from tests.integrations.fuzz.side_by_side import SideBySide
from tests.integrations.support.bounded_row import Bound
from tests.integrations.support.reading_both import Call
from tests.integrations.test_generation import CHUNKS_GO_ON
from tests.reference import Method
from tests.reference.decoding import Summed

pytestmark = pytest.mark.skipif(
    not CHUNKS_GO_ON, reason="this Transformers cuts the masks of later turns in chunks wrongly"
)

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))


def run(machine: Callable[[], RuleBasedStateMachine], **profile: Any) -> None:
    """Conversations of one machine."""
    common = {"deadline": None, "database": None, "report_multiple_bugs": False}
    profile |= {"suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(machine, settings=settings(**common, **profile))


def quickly(machine: Callable[[], RuleBasedStateMachine], examples: int) -> None:
    """The same conversations every time."""
    how = {"derandomize": True, "phases": [Phase.generate], "stateful_step_count": 12}
    run(machine, max_examples=examples, **how)


@pytest.mark.parametrize("kind", KINDS)
def test_conversations(kind: str) -> None:
    go_on(lambda: Conversation(kind), 16)


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_that_evict_while_they_decode(kind: str) -> None:
    go_on(lambda: Conversation(kind, bounded=True), 8)


@pytest.mark.parametrize("name", kinds_machine.KINDS)
def test_conversations_with_every_kind_of_layer(name: str) -> None:
    go_on(lambda: kinds_machine.KindConversation(name), 6)


@pytest.mark.parametrize("name", kinds_machine.KINDS)
def test_conversations_whose_answers_are_bounded(name: str) -> None:
    go_on(lambda: kinds_machine.KindConversation(name, bounded=True), 4)


def go_on(machine: Callable[[], RuleBasedStateMachine], examples: int) -> None:
    """Quickly, or for the machine's share of FUZZ_MINUTES."""
    if not MINUTES:  # for people a quarter of what CI runs
        quickly(machine, examples if os.environ.get("CI") else examples // 4)
    end = time.monotonic() + 60 * MINUTES / (2 * len(KINDS) + 2 * len(kinds_machine.KINDS))
    while time.monotonic() < end:
        run(machine, max_examples=50, stateful_step_count=20)


# The comparison itself.


def padding_counts_when_cropped(tokens: SeenTokens, count: int) -> SeenTokens:
    shorter = original_crop(tokens, count)
    return attrs.evolve(shorter, lengths=tokens.lengths - count)


def restarts_leave_no_gap(tokens: SeenTokens, new_valid: Tensor) -> Tensor:
    return tokens.positions_of(new_valid).clamp(min=0)


def budgets_of_new_tokens(at: PassState, *args: Any, **kwargs: Any) -> None:
    original_start(at, *args, **kwargs)
    at.seen_len = tuple(at.reach.valid.sum(dim=1).tolist())


original_crop, original_start = SeenTokens.without_last, PassState.__init__


def converse(policy: CachePolicy, method: Method) -> None:
    """A conversation in which every one of the faults below shows."""
    shape = ("llama", 3, (4, 2), "sdpa", 0)
    cache, model = PolicyCache(policy), built(*shape)
    side = SideBySide(model, model, (None,) * 3, policy, method, cache)
    side.prompt(Drawn(((40, 1, 40, 0), (23, 2, 23, 0))).columns, [0, 0], Call())
    side.append([[3, 4, 5], [6, None, 7]], Call())
    side.crop(2)
    side.check()
    side.generate(Drawn(((12, 3, 12, 0), (9, 4, 9, 5))).columns, [1, 0], count=3)
    side.check()


def test_a_conversation_is_followed() -> None:
    converse(GemFilter(retention_rate=0.4), reference.GemFilter(retention_rate=0.4))


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (SeenTokens, "without_last", padding_counts_when_cropped),
        (SeenTokens, "rotary_positions_of", restarts_leave_no_gap),
        (PassState, "__init__", budgets_of_new_tokens),
    ],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, fault: Any
) -> None:
    monkeypatch.setattr(place, name, fault)
    with pytest.raises(AssertionError):
        test_a_conversation_is_followed()


# Likewise, of answers that are bounded.


def queries_stay(observed: RecentQueries, *args: Any) -> RecentQueries:
    return observed


def queries_are_forgotten(observed: RecentQueries, *args: Any) -> RecentQueries:
    return attrs.evolve(observed, queries=None)


def sums_begin_anew(observed: RecentQueries, keys: Tensor, carries: int) -> Tensor:
    return torch.zeros(*keys.shape[:3], carries)


BOUNDS = {
    "window": (
        policies.SnapKV(window_size=4, kernel_size=3).decoding_rule(9, every=3),
        Bound(reference.SnapKV(None, 4, 3, 9), every=3, observers=4),
    ),
    "sums": (
        policies.H2O(window_size=2).decoding_rule(9, every=3),
        Bound(Ranked(Summed(), (None, 9), 2, 0), every=3, observers=0),
    ),
}


def answer_bounded(name: str) -> None:
    """A conversation in which every one of the faults below shows, under one of the rules."""
    rule, bound = BOUNDS[name]
    policy = policies.StreamingLLM(0.5, decoding=rule)
    cache, model = PolicyCache(policy), built("llama", 3, (4, 2), "sdpa", 0)
    method = reference.StreamingLLM(0.5)
    side = SideBySide(model, model, (None,) * 3, policy, method, cache, bound=bound)
    side.prompt(Drawn(((40, 1, 40, 0), (23, 2, 23, 0))).columns, [0, 0], Call())
    for token in range(5):
        side.append([[3 + token], [20 + token]], Call())
    side.crop(1)
    side.take_rows([1, 0], reorder=True)
    for token in range(7):
        side.append([[40 + token], [60 + token]], Call())
        side.check()
    side.generate(Drawn(((12, 3, 12, 0), (9, 4, 9, 5))).columns, [1, 0], count=8)
    side.check()


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bounded_answer_is_followed(name: str) -> None:
    answer_bounded(name)


@pytest.mark.parametrize(
    ("place", "name", "fault", "shows"),
    [
        (RecentQueries, "without_last", queries_stay, "window"),
        (RecentQueries, "rows", queries_stay, "window"),
        (RecentQueries, "last", queries_are_forgotten, "window"),
        (RecentQueries, "rows", queries_stay, "sums"),
        (decoding, "carried_for", sums_begin_anew, "sums"),
        (selecting, "carried_for", sums_begin_anew, "sums"),
    ],
)
def test_a_fault_planted_in_bounded_answers_is_found(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, fault: Any, shows: str
) -> None:
    monkeypatch.setattr(place, name, fault)
    with pytest.raises((AssertionError, ShapeError)):  # a window without queries is refused
        answer_bounded(shows)
