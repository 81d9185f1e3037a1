"""What layers, and what a process, hold while a long answer is decoded."""

import os
from typing import Any

import pytest
import torch

from benchmarks.memory import CLEAR, STATUS
from kvpolicy.integrations.transformers import PolicyCache
from tests.integrations.decoding.held_by_process import (
    BUDGET,
    ENTRY,
    EVERY,
    LAYERS,
    growth,
    policy_of,
    wide_model,
)

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
RULES = ["H2O", "SnapKV", "TOVA"]
STEPS = 4000
# What the layers may hold, one in the making, what is chosen by, and the allocator.
ALLOWED = (LAYERS + 4) * (BUDGET + EVERY) * ENTRY + 8 * 2**20
# Each takes seconds; these are of buffers that grow, and of slots that are given up one by one.
CASES = [("H2O", False), ("TOVA", True)]
EVERY_CASE = [(name, fixed) for name in RULES for fixed in (False, True)]

in_process = pytest.mark.skipif(
    not (STATUS.exists() and CLEAR.exists()), reason="Linux tells what was resident, and forgets it"
)


class Watch:
    """A streamer that looks at the cache at every token."""

    def __init__(self, cache: PolicyCache) -> None:
        self.cache, self.seen, self.most, self.most_bytes = cache, 0, 0, 0

    def put(self, value: Any) -> None:
        self.seen += 1
        if self.seen > 1:
            self.most = max(self.most, *(layer.kept_len for layer in self.cache.layers))
            held = max(layer.nbytes() for layer in self.cache.layers)
            self.most_bytes = max(self.most_bytes, held)

    def end(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("fixed", [False, True])
def test_layers_hold_no_more_than_the_bound(name: str, fixed: bool) -> None:
    policy = policy_of(name)
    cache = PolicyCache(policy, max_new_tokens=260 if fixed else None)
    watch, model = Watch(cache), wide_model()
    given = {"max_new_tokens": 260, "do_sample": False, "streamer": watch}
    with torch.no_grad():
        model.generate(torch.arange(1, 65)[None], cache=cache, **given)
    assert policy.decoding is not None
    every = policy.decoding.every
    assert BUDGET <= watch.most <= BUDGET + every
    room = max(every, 16)  # by which what grows does so at once
    assert watch.most_bytes <= (BUDGET + room) * ENTRY


@in_process
@pytest.mark.parametrize(("name", "fixed"), EVERY_CASE if THOROUGH else CASES)
def test_a_process_holds_no_more_than_the_bound(name: str, fixed: bool) -> None:
    assert growth(name, fixed, STEPS) <= ALLOWED
    assert STEPS * LAYERS * ENTRY > 5 * ALLOWED  # what would be held without


@in_process
def test_without_a_bound_a_process_holds_more() -> None:
    """Of an answer that is shorter by far."""
    assert growth("FullContext", False, STEPS // 4) > 1.2 * ALLOWED
