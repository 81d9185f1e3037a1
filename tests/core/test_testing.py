"""The contract tests find what they are there to find."""

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import KVSelector, LayerContext, Scorer
from kvpolicy.heads import Heads
from kvpolicy.policies import (
    AdaptiveHeadSelector,
    GlobalThresholdSelector,
    GQAGroupSelector,
    RandomScorer,
    SinkAndRecentSelector,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from kvpolicy.selection import row_budgets, select_top
from kvpolicy.testing import check_propagation, check_scorer, check_selector
from kvpolicy.testing.draws import FIRST, FixedDraws
from kvpolicy.testing.strategies import draw_context
from tests.contexts import with_layer
from tests.core.odd import odd, with_method, with_property


class Modifying(WindowMaxPoolScorer):
    def score(self, context: LayerContext) -> Tensor:
        saliency = super().score(context)
        context.keys.mul_(2)
        return saliency


def of_this_process(base: Any, name: str) -> Any:
    """A kind of part that takes the heads of one process for all."""

    def method(self: Any, *given: Any) -> Any:
        *saliency, context = given
        return getattr(base, name)(self, *saliency, with_layer(context, heads=Heads()))

    return odd(base, **{name: method})


def scored(change: Any) -> Any:
    return with_method(WindowMaxPoolScorer, "score", change)(3)


def by_column(found: Tensor) -> Tensor:
    """Padding counts as text."""
    return found + torch.arange(found.shape[-1]) / found.shape[-1]


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (Modifying(3), "must not modify the context"),
        (scored(Tensor.bfloat16), "must be float32"),
        (scored(by_column), "the same saliency as without padding"),
        (scored(lambda found: found.transpose(1, 2)), "saliency must be"),
        (scored(lambda found: found / (found.sum(dim=-1, keepdim=True) > 0)), "must be finite"),
        (of_this_process(RandomScorer, "score")(), "get the same saliency as in the whole layer"),
    ],
)
def test_broken_scorers(scorer: Scorer, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_scorer(scorer)


class IgnoresPadding(GQAGroupSelector):
    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        assert saliency is not None
        valid, protected = context.valid, self.protected(context)
        budgets = row_budgets(self.budget, context.seen_len, valid=valid, protected=protected)
        everything = torch.ones_like(valid)
        return select_top(saliency, budgets, valid=everything, protected=protected)


class ProtectsByScore(GQAGroupSelector):
    """The window as a high score: equals of the window take its places."""

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        assert saliency is not None
        valid, protected = context.valid, self.protected(context)
        budgets = row_budgets(self.budget, context.seen_len, valid=valid, protected=protected)
        inflated = saliency.masked_fill(protected, float(saliency.max()))
        return select_top(inflated, budgets, valid=valid, protected=torch.zeros_like(valid))


class SaysOneMore(GQAGroupSelector):
    def kept_counts(self, context: LayerContext) -> tuple[int, ...] | None:
        counts = super().kept_counts(context)
        return None if counts is None else tuple(count + 1 for count in counts)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        return super().select(saliency, attrs.evolve(context, held_len=None))


def selected(select: Any) -> Any:
    return odd(GQAGroupSelector, select=select)(0.3, window_size=3)


def one_too_many(self: Any, saliency: Tensor, context: LayerContext) -> Tensor:
    seen_len = tuple(length + 4 for length in context.seen_len)
    return GQAGroupSelector.select(self, saliency, attrs.evolve(context, seen_len=seen_len))


def least_salient(self: Any, saliency: Tensor, context: LayerContext) -> Tensor:
    return GQAGroupSelector.select(self, -saliency, context)


def row_zero_for_all(self: Any, saliency: Tensor, context: LayerContext) -> Tensor:
    return GQAGroupSelector.select(self, saliency, context)[:1].expand(context.batch, -1, -1)


def trusts_lengths(self: Any, saliency: Tensor, context: LayerContext) -> Tensor:
    """Keeps fewer where it knows how many there are."""
    known = int(context._held_len is not None)
    return GQAGroupSelector.select(self, saliency, context)[..., known:]


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        (SaysOneMore(0.3, window_size=3), "kept_counts must return how many tokens select keeps"),
        (selected(trusts_lengths), "whether held_len is known or not"),
        (ProtectsByScore(0.3, window_size=3), "protected tokens"),
        (
            with_method(GQAGroupSelector, "select", lambda found: found.flip(-1))(0.3),
            "ascending and unique|-1 may come only before",
        ),
        (selected(one_too_many), "exactly"),
        (selected(least_salient), "outscore"),
        (
            selected(row_zero_for_all),
            "padding|exactly|protected|outscore|the same tokens as without padding",
        ),
        (
            of_this_process(AdaptiveHeadSelector, "select")(0.3, window_size=1, floor=0.0),
            "keep the same tokens as in the whole layer",
        ),
    ],
)
def test_broken_selectors(selector: KVSelector, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_selector(selector)


def test_a_selector_that_takes_padding_for_tokens() -> None:
    """Some layers show that too few tokens stay; the smallest shows why."""
    with pytest.raises(AssertionError, match="not those of padding"):
        check_selector(IgnoresPadding(0.3, window_size=3), shrink=True)


class DropsOldTokens(TokenSelectivePropagation):
    """Reads the saliency of the first keys instead of the new ones'."""

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
        assert saliency is not None
        wrong = saliency.roll(context.key_len - context.new_len + 1, dims=-1)
        return super().propagate(wrong, context)


class OnePerHead(KVSelector):
    """A right one without one budget: head h keeps its h + 1 last tokens."""

    @property
    def protected_tail(self) -> int:
        return 1

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        first, most = (
            context.layer.heads.share * context.kv_heads,
            context.kv_heads * context.layer.heads.shares,
        )
        kept = torch.full((context.batch, context.kv_heads, most), -1)
        for head in range(context.kv_heads):
            for back in range(1, first + head + 2):
                held = context.valid[:, head].sum(dim=-1) >= back
                kept[held, head, most - back] = context.key_len - back
        width = int(context.valid.sum(dim=-1).max())
        return kept[..., -min(width, most) :]

    @property
    def needs_saliency(self) -> bool:
        return False


class ThresholdOfEachLayer(GlobalThresholdSelector):
    """Lets layers choose together, and each by itself all the same."""

    def select_together(
        self, saliencies: Sequence[Tensor], contexts: Sequence[LayerContext]
    ) -> list[Tensor]:
        both = zip(saliencies, contexts, strict=True)
        return [super(ThresholdOfEachLayer, self).select_together([s], [c])[0] for s, c in both]


class BudgetOfTheLongestRow(GlobalThresholdSelector):
    """Counts of all rows what it should of each."""

    def select_together(
        self, saliencies: Sequence[Tensor], contexts: Sequence[LayerContext]
    ) -> list[Tensor]:
        most = (max(contexts[0].seen_len),) * contexts[0].batch
        longest = [attrs.evolve(each, seen_len=most) for each in contexts]
        return super().select_together(saliencies, longest)


def heads_of_this_process(self: Any, saliencies: Any, contexts: Sequence[LayerContext]) -> Any:
    alone = [with_layer(each, heads=Heads()) for each in contexts]
    return GlobalThresholdSelector.select_together(self, saliencies, alone)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ThresholdOfEachLayer, "no dropped token of any layer may outscore"),
        (BudgetOfTheLongestRow, "a padded row must keep the same tokens as without padding"),
        (
            odd(GlobalThresholdSelector, select_together=heads_of_this_process),
            "in a process of its own",
        ),
        (
            with_property(GlobalThresholdSelector, "decides_together", False),
            "select_together must raise TypeError",
        ),
    ],
)
def test_broken_choices_of_all_layers(kind: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_selector(kind(0.3, window_size=1))


def test_a_selector_without_one_budget_passes() -> None:
    check_selector(OnePerHead())


def whole(self: Any, num_layers: int, context_len: int | None = None) -> list[float]:
    return [1.0] * num_layers


TSP = TokenSelectivePropagation


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        # Nothing is protected, so that the last token has to score to go on.
        (with_property(TSP, "protected_tail", 0), r"the last token, \d+, must go on"),
        (
            odd(TSP, acting_layers=lambda self, num_layers: frozenset(), layer_rates=whole),
            "acting_layers must name",
        ),
        (odd(TSP, layer_rates=whole), "layer_rates must be below 1"),
        (DropsOldTokens, "outscore"),
        (with_method(TSP, "propagate", lambda found: None), "but propagate returned None"),
        (of_this_process(TSP, "propagate"), "same tokens"),
        (
            odd(TSP, acting_layers=lambda self, num_layers: frozenset({num_layers})),
            "acting_layers must lie in the model",
        ),
    ],
)
def test_broken_propagation(kind: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_propagation(kind(tsp_rate=0.3, window_size=2))


def test_only_components_of_the_kind() -> None:
    with pytest.raises(TypeError, match="component must be a Scorer"):
        check_scorer(SinkAndRecentSelector())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="component must be a KVSelector"):
        check_selector(WindowMaxPoolScorer)  # type: ignore[arg-type]


def test_a_fault_is_shown_where_it_is_first_found() -> None:
    """Only `shrink` asks for the smallest layer; without it few layers are tried."""
    calls = []

    def counted(self: Any, saliency: Tensor, context: LayerContext) -> Tensor:
        calls.append(context.batch)
        return least_salient(self, saliency, context)

    with pytest.raises(AssertionError, match="outscore") as caught:
        check_selector(selected(counted))
    at_first = len(calls)
    assert at_first < 20
    notes = " ".join(caught.value.__notes__)
    assert "query heads" in notes
    assert "shrink=True" in notes
    with pytest.raises(AssertionError, match="outscore"):
        check_selector(selected(counted), shrink=True)
    assert len(calls) > 2 * at_first


def test_fixed_examples_cover_what_layers_differ_in() -> None:
    layers = [draw_context(FixedDraws(number)) for number in range(FIRST)]
    assert any(not bool(each.new_valid.all()) for each in layers)  # padding
    assert any(each.kv_heads > 1 and each.query_heads > each.kv_heads for each in layers)
    assert {each.keys.dtype for each in layers} == {torch.float32, torch.bfloat16}
    assert any(each._kinds is not None for each in layers)
    held = [each.valid.sum(dim=-1) for each in layers]
    assert any(bool((each != each[:, :1]).any()) for each in held)  # unlike heads
    assert any(each.key_len > each.new_len for each in layers)
    assert any(each.key_len > 25 for each in layers)


@attrs.frozen
class ValueNormOfOutputs(Scorer):
    @property
    def needs_output_weight(self) -> bool:
        return True

    def score(self, context: LayerContext) -> Tensor:
        assert context.layer.output_weight is not None
        sizes = context.layer.output_weight.float().norm(dim=(1, 2))
        norms = context.values.float().norm(dim=-1)
        return norms.repeat_interleave(len(sizes) // context.kv_heads, dim=1) * sizes[:, None]


@attrs.frozen
class HalvesTheWeights(ValueNormOfOutputs):
    def score(self, context: LayerContext) -> Tensor:
        found = super().score(context)
        assert context.layer.output_weight is not None
        context.layer.output_weight.mul_(0.5)
        return found


def test_what_is_in_a_group_must_not_be_modified() -> None:
    check_scorer(ValueNormOfOutputs())
    with pytest.raises(AssertionError, match="must not modify"):
        check_scorer(HalvesTheWeights())
