"""kvpress's rules as parts, by loops and by hand."""

import pytest
import torch
from sidebyside.press_scorers import DrawnLeverageScorer, TiedLagScorer, ZeroPaddedChunkScorer
from sidebyside.press_selectors import (
    PressAdaptiveSelector,
    PressChunkSelector,
    PressCriticalAdaSelector,
    PressThresholdSelector,
    TopKSelector,
)
from torch import Tensor

from kvpolicy import LayerContext
from kvpolicy.layer_inputs import AttentionSettings, LayerInputs
from kvpolicy.rotary import PlainRotary, RotaryEmbedding


def context(
    length: int, output_weight: Tensor | None = None, rotary: RotaryEmbedding | None = None
) -> LayerContext:
    generator = torch.Generator().manual_seed(0)
    return LayerContext(
        layer_idx=1,
        num_layers=3,
        queries=torch.randn(1, 6, length, 4, generator=generator),
        keys=torch.randn(1, 2, length, 4, generator=generator),
        values=torch.randn(1, 2, length, 4, generator=generator),
        positions=torch.arange(length).expand(1, 2, length),
        new_valid=torch.ones(1, length, dtype=torch.bool),
        seen_len=(length,),
        attention=AttentionSettings(0.5),
        layer=LayerInputs(rotary=rotary, output_weight=output_weight),
    )


def test_the_last_chunk_is_filled_with_zeros() -> None:
    shown = context(13)  # one sink, chunks of 4, 4 and 3, and the last token
    sums = torch.zeros(6, 13)
    for head in range(6):
        for start, stop in ((1, 5), (5, 9), (9, 12)):
            queries, keys = shown.queries[0, head, start:stop], shown.keys[0, head // 3, start:stop]
            fill = 4 - (stop - start)
            logits = torch.nn.functional.pad(queries @ keys.T, (0, fill, 0, fill))
            sums[head, start:stop] = logits.softmax(dim=-1).sum(dim=0)[: stop - start]
    norms = shown.values[0].norm(dim=-1)
    inner = (sums.view(2, 3, 13).mean(dim=1) * norms)[:, 1:12]
    scores = (inner - inner.mean()) / inner.std()
    found = ZeroPaddedChunkScorer(num_sinks=1, window_size=1, chunk_size=4, kernel_size=1).score(
        shown
    )[0]
    assert torch.allclose(found[:, 1:12], scores, atol=1e-5)
    assert not found[:, [0, 12]].any()


def test_leverage_of_a_wide_projection_is_that_of_the_keys() -> None:
    rotary = PlainRotary(4)
    shown = context(25, rotary=rotary)
    before = rotary.turned_back(shown.keys, shown.positions)[0].double()
    keys = before - before.mean(dim=1, keepdim=True)
    leverage = torch.stack([(head @ torch.linalg.pinv(head)).diagonal() for head in keys])
    found = DrawnLeverageScorer(num_sinks=0, window_size=0, sketch_size=400).score(shown)[0]
    expected = (leverage - leverage.mean()) / leverage.std()
    assert torch.allclose(found.double(), expected, atol=0.02)


def test_all_that_is_always_kept_scores_the_same() -> None:
    scores = TiedLagScorer(num_sinks=2, lag_size=4).score(context(16))[0]
    tied = scores == 1
    assert tied.tolist() == [[True] * 2 + [False] * 8 + [True] * 6] * 2
    assert scores.max() == 1
    expected = scores.topk(8).indices.sort().values
    selector = TopKSelector(0.5, window_size=0)
    assert torch.equal(selector.select(scores[None], context(16))[0], expected)


def test_chunks_are_kept_whole() -> None:
    saliency = torch.zeros(1, 2, 18)
    saliency[0, 0, 7], saliency[0, 1, 11] = 3.0, 2.0
    kept = PressChunkSelector(0.5, window_size=1, chunk_length=5).select(saliency, context(18))
    # Two of four chunks: that of token 7, and the last, whose token 17 scores most, at 3 for each.
    assert kept.tolist() == [[[5, 6, 7, 8, 9, 15, 16, 17]] * 2]


@pytest.mark.parametrize(("floor", "counts"), [(0.6, [14, 6]), (0.2, [16, 4]), (0.0, [16, 4])])
def test_a_floor_has_the_window_in_it(floor: float, counts: list[int]) -> None:
    saliency = torch.rand(1, 2, 20) + torch.tensor([[[1.0], [0.0]]])
    kept = PressAdaptiveSelector(0.5, window_size=4, floor=floor).select(saliency, context(20))
    assert (kept >= 0).sum(dim=-1).tolist() == [counts]
    assert (kept[0, :, -4:] == torch.arange(16, 20)).all()


def test_a_floor_goes_by_attention_alone() -> None:
    shown = context(20, output_weight=torch.eye(4).expand(6, 4, 4))
    saliency = torch.linspace(1, 0, 20).expand(1, 2, 20) + torch.tensor([[[1.0], [0.0]]])
    shown.values[0, :, 12] = 1e6  # what a second stage takes first
    adaptive = PressAdaptiveSelector(0.5, window_size=4, floor=0.6)
    kept = PressCriticalAdaSelector(adaptive, first_share=0.5)
    upper, lower = kept.select(saliency, shown)[0].tolist()
    assert lower == [-1] * 8 + [0, 1, 16, 17, 18, 19]  # its floor is all of it
    assert set(upper) >= {0, 1, 2, 12}  # seven of 14 by attention, the window among them


def test_as_many_go_as_the_ratio_of_all() -> None:
    shown = [context(11)] * 3
    saliencies = list(torch.rand(3, 1, 2, 11))
    kept = PressThresholdSelector(0.3, window_size=0, protect=1).select_together(saliencies, shown)
    flat = torch.cat(saliencies)
    flat[..., 0] = 2.0
    least = flat.flatten().sort().values[int(66 * 0.7)]
    for layer, scores in zip(kept, flat, strict=True):
        for head in range(2):
            found = [place for place in layer[0, head].tolist() if place >= 0]
            assert found == (scores[head] >= least).nonzero()[:, 0].tolist()
