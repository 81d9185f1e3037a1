"""Keys that say twice what others say: against slow loops, over several runs and blocks."""

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import LayerContext, attention
from kvpolicy.policies import RedundancyScorer
from tests.reference.decoding import softmax
from tests.reference.selection import max_pool

from .support import check_tokens, held_by, random_layer


def with_copies(context: LayerContext, seed: int) -> LayerContext:
    """Every third key is nearly that of another place, so that most have several likenesses."""
    generator = torch.Generator().manual_seed(seed)
    length = context.key_len
    other = torch.randint(0, length, (length,), generator=generator)
    other = torch.where(torch.arange(length) % 3 == 0, other, torch.arange(length))
    noise = 0.1 * torch.randn(context.keys.shape, generator=generator)
    return attrs.evolve(context, keys=context.keys[:, :, other] + noise)


def slow(keys: Tensor, threshold: float) -> list[float]:
    """Softmax over keys ``[len, head_dim]`` of their mean cosine, the newest copy left out."""
    unit = keys.double() / keys.double().norm(dim=-1, keepdim=True)
    sums = [0.0] * len(unit)
    for row, likeness in enumerate((unit @ unit.T).tolist()):
        alike = [key for key, each in enumerate(likeness) if each > threshold and key != row]
        for key, each in enumerate(likeness):
            sums[key] += 0.0 if key in (row, max(alike, default=row)) else each
    return softmax([total / len(unit) for total in sums])


def slow_attention(context: LayerContext, row: int, head: int, window: int) -> list[float]:
    """Softmax of the group's largest products, the mean over the row's own last queries."""
    keys = context.keys[row, head][context.valid[row, head]].double()[:-window]
    queries = context.queries[row, 2 * head : 2 * head + 2, :].double()
    own = [at for at in range(context.query_len) if context.query_valid[row, at]]
    given = [
        softmax([max((queries[:, at] @ key).tolist()) * context.attention.scaling for key in keys])
        for at in own
    ]
    return max_pool([sum(column) / len(own) for column in zip(*given, strict=True)], 3)


def test_attention_is_that_of_slow_loops_in_padded_rows() -> None:
    """A later turn of 6, 3 and 2 new tokens: of four queries the last row has two of its own."""
    lens, counts = (17, 9, 8), torch.tensor([6, 3, 2])
    new_valid = torch.arange(6) >= 6 - counts[:, None]
    context = attrs.evolve(random_layer(7, lens, query_len=4), new_valid=new_valid)
    assert context.query_valid.sum(dim=1).tolist() == [4, 3, 2]
    check_tokens(
        RedundancyScorer(window_size=4, kernel_size=3, importance=1.0).score(context),
        context,
        lambda row, head: [*slow_attention(context, row, head, 4), 0.0, 0.0, 0.0, 0.0],
        rel=1e-4,
    )


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("block_bytes", [1 << 22, 1 << 16, 1 << 10])
def test_redundancy_is_that_of_slow_loops(
    monkeypatch: pytest.MonkeyPatch, threshold: float, block_bytes: int
) -> None:
    """Blocks of several heads, of one, and of a few keys; the last run is not full."""
    monkeypatch.setitem(attention.BLOCK_BYTES, "cpu", block_bytes)
    context = with_copies(random_layer(3, (213, 150), query_len=4), 5)
    scorer = RedundancyScorer(window_size=1, kernel_size=1, importance=0.0, threshold=threshold)

    def expected(row: int, head: int) -> list[float]:
        return [*slow(held_by(context, row, head)[0], threshold)[:-1], 0.0]

    before = context.keys.clone()
    check_tokens(-scorer.score(context), context, expected, rel=1e-4)
    assert torch.equal(context.keys, before)
