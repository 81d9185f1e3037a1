"""The most that any query attends to a token, against loops."""

import pytest
import torch

from kvpolicy import attention
from kvpolicy.policies import PeakAttentionScorer
from tests.contexts import with_attention
from tests.policies.views import view_of
from tests.reference.attention import attention_probabilities

from .support import check_tokens, random_layer


@pytest.mark.parametrize("block_bytes", [1 << 22, 400])
def test_against_loops(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setitem(attention.BLOCK_BYTES, "cpu", block_bytes)
    context = random_layer(3, (11, 7), query_len=11)

    def expected(row: int, head: int) -> list[float]:
        view = view_of(context, row)
        given = [
            attention_probabilities(queries, view.new_positions, view.entries[head], view.scaling)
            for queries in view.queries[2 * head : 2 * head + 2]
        ]
        return torch.cat(given).amax(dim=0).tolist()

    found = PeakAttentionScorer().score(context)
    assert found.shape == (2, 3, 11)
    check_tokens(found, context, expected, abs=1e-6)


def test_a_sink_takes_its_share() -> None:
    context = random_layer(5, (9,), query_len=9)
    with_sink = with_attention(context, sinks=torch.full((6,), 20.0))
    assert bool((PeakAttentionScorer().score(with_sink) < 1e-3).all())
