"""Bytes of live tensors: what is made counts once, until nobody refers to it."""

import torch
from torch import Tensor

from kvpolicy.evaluation.cost.live_bytes import LiveBytes


def test_storages_count_once_and_until_their_last_view_is_gone() -> None:
    with LiveBytes() as live:
        whole = torch.ones(100)
        view = whole[10:].view(9, 10)
        assert live.live == 400
        del whole
        assert live.live == 400  # the view holds all of it
        del view
        assert (live.live, live.peak) == (0, 400)
        assert live.restart() == 400
        assert live.peak == 0


def test_what_was_there_before_does_not_count_nor_what_is_made_in_a_pause() -> None:
    weight = torch.ones(7, 5)
    with LiveBytes([weight]) as live:
        turned = weight.t()
        assert live.live == 0
        with live.paused():
            spare = torch.ones(11)
        part = spare[2:]
        assert live.live == 0
        product = turned @ weight
        assert live.live == 100
    assert (part.shape[0], product.shape) == (9, (5, 5))


def test_a_function_gives_back_what_it_does_not_return() -> None:
    def spread(numbers: Tensor) -> Tensor:
        return (numbers - numbers.mean()).square().mean()

    numbers = torch.ones(1000, device="meta")
    with LiveBytes([numbers]) as live:
        found = spread(numbers)
    assert (found.ndim, live.live, live.peak) == (0, 4, 8000)
