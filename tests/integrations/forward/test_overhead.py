"""What a policy costs a layer, counted: operators, Python calls, and calls from file to file."""

import pytest

from benchmarks.common import BASELINE
from benchmarks.overhead import count_rows
from tests.integrations.support.versions import OLD
from tests.tools.crossings import SITUATIONS, per_layer, situation

counted = pytest.mark.skipif(OLD, reason="other releases call other functions themselves")

# The most that a layer may add: operators in a prompt of 512 tokens and in a token of `generate`.
# Such a token has no more Python calls than without a policy.
LIMITS = {
    "FullContext": (-2, 0),
    "StreamingLLM": (8, 0),
    "SnapKV": (36, 0),
    "KeyDiff": (27, 0),
    "FastKV": (36, 0),
    "AdaKV": (65, 9),
}

# The most Python calls that a layer may add in such a prompt.
CALLS = {
    "FullContext": 34,
    "StreamingLLM": 75,
    "SnapKV": 95,
    "KeyDiff": 89,
    "FastKV": 105,
    "AdaKV": 123,
}


@counted
def test_operators_of_a_layer() -> None:
    for row in count_rows(list(LIMITS), 512, 4, "operators")[1:]:
        prompt, token = LIMITS[row["policy"]]
        assert row["prompt_added"] <= prompt, row
        assert row["token_added"] <= token, row


@counted
def test_python_calls_of_a_layer() -> None:
    rows = count_rows(list(LIMITS), 512, 4, "calls")
    assert rows[0]["policy"] == BASELINE
    for row in rows[1:]:
        assert row["prompt_added"] <= CALLS[row["policy"]], row
        assert row["token_added"] <= 0, row


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_layer_costs_few_crossings(name: str) -> None:
    assert situation(name, 8)[0].total() > 8  # something is counted
    assert per_layer(name) <= SITUATIONS[name]
