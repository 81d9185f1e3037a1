"""Keys that say twice what others say: against slow loops, over several runs and blocks."""

import attrs
import pytest
import torch

from kvpolicy import LayerContext, attention
from kvpolicy.policies import RedundancyScorer
from tests.policies.views import view_of
from tests.reference.scored_methods import RKV

from .support import check_tokens, random_layer


def with_copies(context: LayerContext, seed: int) -> LayerContext:
    """Every third key is nearly that of another place, so that most have several likenesses."""
    generator = torch.Generator().manual_seed(seed)
    length = context.key_len
    other = torch.randint(0, length, (length,), generator=generator)
    other = torch.where(torch.arange(length) % 3 == 0, other, torch.arange(length))
    noise = 0.1 * torch.randn(context.keys.shape, generator=generator)
    return attrs.evolve(context, keys=context.keys[:, :, other] + noise)


def test_attention_is_that_of_slow_loops_in_padded_rows() -> None:
    """A later turn of 6, 3 and 2 new tokens: of four queries the last row has two of its own."""
    lens, counts = (17, 9, 8), torch.tensor([6, 3, 2])
    new_valid = torch.arange(6) >= 6 - counts[:, None]
    context = attrs.evolve(random_layer(7, lens, query_len=4), new_valid=new_valid)
    assert context.query_valid.sum(dim=1).tolist() == [4, 3, 2]

    def expected(row: int, head: int) -> list[float]:
        view = view_of(context, row)
        importances = RKV(window_size=4, kernel_size=3).importances(view, head)
        return [*importances, 0.0, 0.0, 0.0, 0.0]

    scorer = RedundancyScorer(window_size=4, kernel_size=3, importance=1.0)
    check_tokens(scorer.score(context), context, expected, rel=1e-4)


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
        held = view_of(context, row).entries[head]
        return [*RKV(threshold=threshold).redundancy(held)[:-1], 0.0]

    before = context.keys.clone()
    check_tokens(-scorer.score(context), context, expected, rel=1e-4)
    assert torch.equal(context.keys, before)
