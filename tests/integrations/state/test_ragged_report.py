"""Heads and rows that hold unlike numbers of tokens: right in `generate`; the bytes they hold."""

from functools import cache

import attrs
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, KVSelector, LayerContext
from kvpolicy.integrations.transformers import CacheReport, LayerReport, PolicyCache
from kvpolicy.policies import (
    H2O,
    TOVA,
    AdaKV,
    AdaptiveHeadSelector,
    FastKV,
    FullContext,
    KeyDiff,
    KeyDiffScorer,
    KeyNorm,
    PassAllPropagation,
    PyramidKV,
    Random,
    SnapKV,
    StagedPropagation,
    StreamingLLM,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from kvpolicy.selection import compress
from tests.integrations.support.conversation import (
    FIRST_LENS,
    NUM_DECODE,
    SECOND_LENS,
    left_padded,
    run_conversation,
)
from tests.reference import Act, dense_masked_logits, random_tokens, tiny_model, visible_after

# A slot of a tiny llama: key and value of head_dim 8 in float32.
SLOT_BYTES = 2 * 8 * 4
ROWS = (0, 1, 2)


@cache
def llama() -> PreTrainedModel:
    return tiny_model("llama", seed=3)


def prefilled(policy: CachePolicy, lengths: tuple[int, ...]) -> PolicyCache:
    """A cache after the prompts of some rows, padded on the left."""
    store = PolicyCache(policy)
    ids, mask = left_padded([random_tokens(row, length) for row, length in enumerate(lengths)])
    with torch.no_grad(), store.attached(llama()):
        llama()(ids, attention_mask=mask, cache=store)
    return store


def staged(*stages: tuple[int, float]) -> StagedPropagation:
    return StagedPropagation(
        [
            TokenSelectivePropagation(tsp_layer=layer, tsp_rate=rate, window_size=4, protect=2)
            for layer, rate in stages
        ]
    )


# Of one row, whose heads keep as many tokens as each other: nothing is packed.
ALIKE: dict[str, CachePolicy] = {
    "streamingllm": StreamingLLM(0.3),
    "snapkv": SnapKV(0.3),
    "fastkv": FastKV(tsp_rate=0.5, retention_rate=0.3),
    "h2o": H2O(0.3),
    "tova": TOVA(0.3),
    "key_norm": KeyNorm(0.3),
    "keydiff": KeyDiff(0.3),
    "random": Random(0.3, seed=1),
}
POLICIES: dict[str, CachePolicy] = {
    **ALIKE,
    "pyramidkv": PyramidKV(0.3, window_size=4, kernel_size=3, beta=5, protect=1),
    "adakv": AdaKV(0.3, window_size=4, kernel_size=3),
    "ada_kv_shared": AdaKV(0.2, window_size=2, kernel_size=1, floor=0.0, protect=3),
    # Without a window or a floor a head may be left with no token at all.
    "empty_heads": CachePolicy(
        KeyDiffScorer(), AdaptiveHeadSelector(0.03, window_size=0, floor=0.0), PassAllPropagation()
    ),
    "ada_kv_staged": CachePolicy(
        WindowMaxPoolScorer(4),
        AdaptiveHeadSelector(0.2, window_size=4, protect=2),
        staged((0, 0.6), (2, 0.3)),
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_two_turns_equal_dense_attention(name: str) -> None:
    """Every row alone, under masks made of the positions that the cache names."""
    rows, unlike = ROWS[:1] if name in ALIKE else ROWS, 0
    store, turns = run_conversation(llama(), POLICIES[name], rows=rows)
    for row in rows:
        ids, acts = [], []
        for index, length in enumerate((FIRST_LENS[row], SECOND_LENS[row])):
            start = len(ids) - bool(index)  # the last token of the first turn was not read in it
            ids += random_tokens(100 * index + row, length)
            kept = turns[index].kept[row]
            reached, now = [], list(range(start, len(ids)))
            for layer in range(4):
                reached.append(now)
                now = turns[index].propagated.get(layer, [now] * len(ROWS))[row]
            acts.append(Act(start, len(ids), kept, reached))
            ids += turns[index].tokens[row].tolist()
            unlike += sum(len(heads[0]) != len(heads[1]) for heads in kept)
        visible = visible_after(acts, query_heads=6, length=len(ids) - 1)
        dense = dense_masked_logits(llama(), ids[:-1], visible)
        for act, turn in zip(acts, turns, strict=True):
            expected = dense[act.end - 1 : act.end + NUM_DECODE]
            assert (turn.logits[row] - expected).abs().max() < 1e-4
            assert any(len(head) < act.end for heads in act.kept for head in heads)
    assert (unlike > 0) == (name not in (*ALIKE, "pyramidkv"))
    tokens = sum(int((layer.positions >= 0).sum()) for layer in store.layers)
    report = store.report().total
    assert report.held_bytes - report.padding_bytes == tokens * SLOT_BYTES


def test_ada_kv_is_held_without_padding() -> None:
    """Rows of 50 and 30 tokens at 0.2: 2 heads hold 20 and 12 in all, whatever one of them has."""
    store = prefilled(AdaKV(0.2, window_size=4), (50, 30))
    report = store.report()
    for layer, line in zip(store.layers, report.layers, strict=True):
        counts = (layer.positions >= 0).sum(dim=-1).tolist()
        assert [sum(row) for row in counts] == [20, 12]
        width = max(counts[0] + counts[1])
        assert layer.kept_len == width
        assert line.kept == 16
        assert 2 * 2 * width > 20 + 12 + 4  # what padding would cost
        assert line.padding_bytes == 0
        assert line.held_bytes == layer.nbytes() == (20 + 12) * SLOT_BYTES
    assert report.total.padding_bytes == 0


@attrs.frozen
class FiveAndEleven(KVSelector):
    """Keeps the last 5 tokens in head 0 and the last 11 in head 1."""

    @property
    def needs_saliency(self) -> bool:
        return False

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        tails = [context.is_tail(size)[:, head] for head, size in enumerate((5, 11))]
        return compress(torch.stack(tails, dim=1), 11)


@pytest.mark.parametrize(
    ("policy", "lengths", "slots"),
    [
        (FullContext(), (40,), 0),
        (SnapKV(0.3), (40,), 0),
        # The padding of the shorter prompt, in both heads: at most a sixteenth of all slots.
        (FullContext(), (40, 35), 2 * 5),
        (FullContext(), (40, 34), 0),
        (FullContext(), (40, 27), 0),
        (SnapKV(0.5), (40, 36), 2 * (20 - 18)),
        (SnapKV(0.5), (40, 28), 0),
        (CachePolicy(None, FiveAndEleven(), PassAllPropagation()), (40,), 0),
        (CachePolicy(None, FiveAndEleven(), PassAllPropagation()), (40, 7), 0),
    ],
)
def test_padding_by_hand(policy: CachePolicy, lengths: tuple[int, ...], slots: int) -> None:
    """Rows and heads of nearly equal length are padded, others are not."""
    report = prefilled(policy, lengths).report()
    assert [line.padding_bytes for line in report.layers] == [slots * SLOT_BYTES] * 4
    assert report.total.padding_bytes == 4 * slots * SLOT_BYTES


def test_an_empty_cache_and_tokens_that_were_appended() -> None:
    assert PolicyCache(AdaKV()).report().total == LayerReport(0, 0.0, 0, 0)
    store = prefilled(CachePolicy(None, FiveAndEleven(), PassAllPropagation()), (40,))
    with torch.no_grad(), store.attached(llama()):
        llama()(torch.tensor([[7]]), cache=store)
    (line, *_) = store.report().layers
    assert (line.kept, line.padding_bytes, line.held_bytes) == (9.0, 0, 18 * SLOT_BYTES)


def test_the_table_shows_padding_in_80_columns() -> None:
    layer = LayerReport(1_048_576, 524_288.5, 68_719_476_736, 137_438_953_472, 9_999_999)
    header, first, total = str(CacheReport((layer,))).splitlines()
    assert len(header) == len(first) == len(total) == 80
    assert (
        " ".join(header.split()) == "layer tokens seen tokens kept bytes padding full cache share"
    )
    numbers = "1,048,576 524,288.5 68,719,476,736 9,999,999 137,438,953,472 50.0%"
    assert " ".join(first.split()) == f"0 {numbers}"
    assert " ".join(total.split()) == f"total {numbers}"
