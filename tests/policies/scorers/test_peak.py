"""The most that any query attends to a token, against loops."""

import pytest
import torch

from kvpolicy import attention
from kvpolicy.policies import PeakAttentionScorer
from tests.contexts import with_attention
from tests.policies.scorers.support import random_layer


@pytest.mark.parametrize("block_bytes", [1 << 22, 400])
def test_against_loops(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setitem(attention.BLOCK_BYTES, "cpu", block_bytes)
    context = random_layer(3, (11, 7), query_len=11)
    found = PeakAttentionScorer().score(context)
    assert found.shape == (2, 3, 11)
    for row, length in enumerate((11, 7)):
        for head in range(3):
            first = 11 - length
            most = [0.0] * length
            for query_head in (2 * head, 2 * head + 1):
                for query in range(length):
                    own = context.queries[row, query_head, first + query]
                    keys = context.keys[row, head, first : first + query + 1]
                    weights = (keys @ own * context.attention.scaling).softmax(dim=0).tolist()
                    most[: query + 1] = map(max, zip(most, weights, strict=False))
            assert found[row, head, first:].tolist() == pytest.approx(most, abs=1e-6)


def test_a_sink_takes_its_share() -> None:
    context = random_layer(5, (9,), query_len=9)
    with_sink = with_attention(context, sinks=torch.full((6,), 20.0))
    assert bool((PeakAttentionScorer().score(with_sink) < 1e-3).all())
