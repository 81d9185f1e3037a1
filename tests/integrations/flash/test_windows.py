"""Sliding windows, which flash attention measures in keys: layers hold all tokens in them.

Where a prompt is shorter than a window, sdpa lets the policy choose in that layer too. Under flash
attention the layer keeps its tokens, since later tokens would see past those that are missing.
"""

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy, LayerContext
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.model.masks import Visibility
from kvpolicy.policies import (
    FullContext,
    GQAGroupSelector,
    KeepAllSelector,
    PassAllPropagation,
    SnapKV,
    StreamingLLM,
    WindowMaxPoolScorer,
)
from tests.integrations.flash.support import assert_close, forward, model_of
from tests.integrations.support.conversation import left_padded
from tests.integrations.support.reading import assert_same_positions
from tests.reference import random_tokens

WINDOW = 16
# Kinds of layers of each model; True for those with a window.
WINDOWED = {"gemma3": [True, True, False] * 2, "mistral_sliding": [True] * 4}


@attrs.frozen
class WholeInWindows(GQAGroupSelector):
    """Keeps all tokens in layers with a window, and chooses in the others."""

    windowed: list[bool] = attrs.field(factory=list, kw_only=True)

    def kept_counts(self, context: LayerContext) -> tuple[int, ...] | None:
        return None

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        if self.windowed[context.layer_idx]:
            return KeepAllSelector().select(saliency, context)
        return super().select(saliency, context)


def talk(model: Any, policy: CachePolicy, rows: tuple[int, ...]) -> tuple[PolicyCache, Tensor]:
    """Two turns of rows that both begin below the window and end above it, token by token."""
    store = PolicyCache(policy)
    ids, mask = left_padded([random_tokens(row, (12, 7)[row]) for row in rows])
    logits = []
    with store.attached(model):
        for turn in range(2):
            if turn:
                store.start_turn()
                ids, added = left_padded([random_tokens(5 + row, (4, 9)[row]) for row in rows])
                mask = torch.cat([mask, added], dim=1)
            for _ in range(13):
                logits.append(forward(model, store, ids, attention_mask=mask)[:, -1])
                ids = logits[-1].argmax(dim=-1)[:, None]
                mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            mask = mask[:, :-1]
    return store, torch.stack(logits)


@pytest.mark.parametrize("rows", [(0,), (0, 1)], ids=["one", "padded"])
@pytest.mark.parametrize("name", WINDOWED)
def test_answers_that_outgrow_the_window(name: str, rows: tuple[int, ...]) -> None:
    how: dict[str, Any] = {"retention_rate": 0.5, "window_size": 3}
    selectors = (WholeInWindows(**how, windowed=WINDOWED[name]), GQAGroupSelector(**how))
    (expected_store, expected), (store, found) = (
        talk(model_of(name, flash), CachePolicy(*parts), rows)
        for flash, parts in zip(
            ("", "flash_attention_2"),
            [(WindowMaxPoolScorer(3), each, PassAllPropagation()) for each in selectors],
            strict=True,
        )
    )
    assert_close(found, expected)
    assert_same_positions(store, expected_store)


def test_a_window_alone_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding nothing is read from tensors to make a mask."""

    def never(self: Visibility, *arguments: Any) -> None:
        raise AssertionError("a mask was made")

    monkeypatch.setattr(Visibility, "mask", never)
    talk(model_of("gemma3", "flash_attention_2"), SnapKV(0.4), (0,))


@pytest.mark.parametrize("policy", [FullContext(), StreamingLLM(0.4)], ids=str)
def test_what_a_layer_with_a_window_holds(policy: CachePolicy) -> None:
    """As much as under sdpa once the context is longer than the window."""
    for flash in ("", "flash_attention_2"):
        model, store = model_of("gemma3", flash), PolicyCache(policy)
        with store.attached(model):
            forward(model, store, torch.tensor([random_tokens(1, 40)]))
        assert store.layers[0].kept_len == WINDOW - 1
        assert store.layers[2].kept_len == (40 if policy == FullContext() else WINDOW)
