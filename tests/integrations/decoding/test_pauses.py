"""Rows that pause while others answer: they choose by their own last queries, however far back."""

from pathlib import Path

import pytest
import torch

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import TOVA, FullContext, SnapKV
from tests import reference
from tests.integrations.support.bounded_row import Bound
from tests.integrations.support.reading_both import Call, ReadingBoth
from tests.reference import Scored, random_tokens, tiny_model
from tests.reference.methods import Choice, LayerView

TOKENS = 12


class LastAttention(Scored):
    """`reference.TOVA` under a number of tokens."""

    def choose(self, layer: LayerView) -> Choice:
        """By a rate that makes it that number."""
        return reference.TOVA((TOKENS + 0.5) / layer.seen, 1).choose(layer)


# By name, the rule as the library has it, how many queries it looks at, and as the reference does.
RULES = {
    "window": (SnapKV(window_size=4, kernel_size=3), 4, reference.SnapKV(None, 4, 3, TOKENS)),
    "last": (TOVA(), 1, LastAttention()),
}
# By column, whether each row has a token there: pauses longer than any window, of one or the other.
PAUSES = [(1, 1)] * 3 + [(0, 1)] * 6 + [(0, 1), (1, 1), (0, 1)] * 2 + [(1, 0)] * 7 + [(1, 1)] * 5


def paused(name: str, every: int) -> ReadingBoth:
    """A cache and the reference after a prompt of two rows."""
    method, observers, chooses = RULES[name]
    policy = FullContext(decoding=method.decoding_rule(TOKENS, every))
    model, bound = tiny_model("llama", seed=5), Bound(chooses, every, observers)
    how = model, model, (None,) * 4, policy, reference.FullContext(), PolicyCache(policy)
    both = ReadingBoth(*how, bound=bound)
    prompt = [random_tokens(1, 30), [None] * 7 + random_tokens(2, 23)]
    both.prompt(prompt, [0, 0], Call())
    return both


def go_on(both: ReadingBoth, first: int, last: int) -> None:
    """Reads columns of the answer, and compares after each."""
    said = random_tokens(3, len(PAUSES)), random_tokens(4, len(PAUSES))
    for step in range(first, last):
        there = PAUSES[step]
        column = [[row[step] if here else None] for row, here in zip(said, there, strict=True)]
        both.append(column, Call())
        both.check()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("every", [1, 3, 9])
def test_a_row_that_pauses_looks_at_its_own_last_queries(name: str, every: int) -> None:
    go_on(paused(name, every), 0, len(PAUSES))


def test_what_rows_look_at_is_bounded_and_goes_along(tmp_path: Path) -> None:
    both = paused("window", 9)
    go_on(both, 0, 13)
    for layer in both.cache.layers:
        assert layer.observed.columns is not None
        assert layer.observed.count <= 4 + 1
    both.cache.save(tmp_path / "cache")
    both.cache = PolicyCache.load(tmp_path / "cache")
    go_on(both, 13, 16)
    both.cache.crop(-2)
    for row, columns in zip(both.rows, both.columns, strict=True):
        row.take_back(2)
        del columns[-2:]
    both.appended -= 2
    both.cache.reorder_cache(torch.tensor([1, 0]))
    both.cache.reorder_cache(torch.tensor([1, 0]))
    go_on(both, 14, len(PAUSES))
