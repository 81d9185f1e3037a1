"""What a policy costs a layer, counted: operators and Python calls over Transformers' own cache."""

import pytest

from benchmarks.common import BASELINE
from benchmarks.overhead import count_rows
from tests.integrations.support.versions import OLD

pytestmark = pytest.mark.skipif(OLD, reason="other releases call other functions themselves")

# The most that a layer may add: operators in a prompt of 512 tokens and in a token of `generate`,
# and the share of Python calls in that token.
LIMITS = {
    "FullContext": (4, 0, 1.06),
    "StreamingLLM": (12, 0, 1.06),
    "SnapKV": (45, 0, 1.06),
    "KeyDiff": (35, 0, 1.06),
    "FastKV": (50, 0, 1.06),
    "AdaKV": (75, 12, 1.25),
}


def test_operators_of_a_layer() -> None:
    for row in count_rows(list(LIMITS), 512, 4, "operators")[1:]:
        prompt, token, _ = LIMITS[row["policy"]]
        assert row["prompt_added"] <= prompt, row
        assert row["token_added"] <= token, row


def test_python_calls_of_a_layer() -> None:
    rows = count_rows(list(LIMITS), 512, 4, "calls")
    assert rows[0]["policy"] == BASELINE
    for row in rows[1:]:
        assert row["token"] <= LIMITS[row["policy"]][2] * rows[0]["token"], row
