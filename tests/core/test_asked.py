"""What parts may ask for of a layer: who is shown it, and at which layers it is made."""

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy, DecodingEviction, LayerContext, RotaryEmbedding, Scorer
from kvpolicy.layer_inputs import AttentionSettings, LayerInputs
from kvpolicy.policies import (
    GQAGroupSelector,
    KeepAllSelector,
    KeyNormScorer,
    MaxScorer,
    PassAllPropagation,
    RestartPropagation,
    StagedPropagation,
    TokenSelectivePropagation,
    ValueAwareScorer,
    WindowMaxPoolScorer,
)
from kvpolicy.rotary import PlainRotary
from kvpolicy.testing import check_propagation, check_scorer, check_selector
from tests.contexts import with_layer
from tests.core.odd import odd
from tests.integrations.support.asking import (
    CarriedOnScorer,
    LargestOfLayers,
    OutputScorer,
    RememberingSelector,
    TurnedBackScorer,
)


def context_of(layer_idx: int = 2, history: int = 3) -> LayerContext:
    """Two rows, 2 KV heads of 6 channels, 3 query heads a group, 11 new tokens of 11."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return LayerContext(
        layer_idx=layer_idx,
        num_layers=5,
        queries=normal(2, 6, 11, 6),
        keys=normal(2, 2, 11, 6),
        values=normal(2, 2, 11, 6),
        positions=torch.arange(11).expand(2, 2, -1),
        new_valid=torch.ones(2, 11, dtype=torch.bool),
        seen_len=(11, 11),
        attention=AttentionSettings(0.4),
        layer=LayerInputs(
            history=tuple(normal(2, 6, 11).abs() for _ in range(history)),
            rotary=PlainRotary(6),
            output_weight=normal(6, 6, 13),
        ),
    )


WINDOW = WindowMaxPoolScorer()


@attrs.frozen
class Noting(WindowMaxPoolScorer):
    """Notes what it is shown."""

    shown: list[LayerContext] = attrs.field(factory=list, eq=False)

    def score(self, context: LayerContext) -> Tensor:
        self.shown.append(context)
        return super().score(context)


@pytest.mark.parametrize(
    "asked", [{}, {"history_layers": 2}, {"needs_rotary": True}, {"needs_output_weight": True}]
)
def test_a_part_is_shown_what_it_declares(asked: dict[str, Any]) -> None:
    """Whatever else other parts of the policy have asked for."""
    scorer, context = odd(Noting, **asked)(2), context_of()
    CachePolicy(scorer, GQAGroupSelector(0.5), PassAllPropagation()).decide(context)
    (shown,) = scorer.shown
    count = asked.get("history_layers", 0)
    assert len(shown.layer.history) == count
    for own, given in zip(shown.layer.history, context.layer.history[3 - count :], strict=True):
        assert own is given
    for name in ("rotary", "output_weight"):
        given = getattr(context.layer, name) if f"needs_{name}" in asked else None
        assert getattr(shown.layer, name) is given


NOTHING: tuple[Any, ...] = (), None, None


@attrs.frozen
class Undeclared(GQAGroupSelector):
    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        layer = context.layer
        assert (layer.history, layer.rotary, layer.output_weight) == NOTHING
        return super().select(saliency, context)


class UndeclaredDrop(TokenSelectivePropagation):
    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
        layer = context.layer
        assert (layer.history, layer.rotary, layer.output_weight) == NOTHING
        return super().propagate(saliency, context)


def test_neither_are_selectors_and_propagation_shown_more() -> None:
    policy = CachePolicy(TurnedBackScorer(), Undeclared(0.5), UndeclaredDrop(0.5, tsp_layer=2))
    assert policy.decide(context_of()).passed_on is not None
    assert policy.history_layers == 0
    assert policy.needs_rotary
    assert not policy.needs_output_weight


@pytest.mark.parametrize("scorer", [CarriedOnScorer(3), TurnedBackScorer(), OutputScorer()])
def test_the_contract_of_scorers(scorer: WindowMaxPoolScorer) -> None:
    check_scorer(scorer)


def test_the_contract_of_the_others() -> None:
    check_selector(RememberingSelector(0.3, window_size=2))
    check_propagation(LargestOfLayers(tsp_rate=0.3, window_size=2, layers=(4,)))


class OfTheseHeads(RememberingSelector):
    """Means of history over the heads of one process, and all of its slots."""

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        own = tuple(each[:, :1] for each in context.layer.history)
        return super().select(saliency, with_layer(context, history=own))


class ReadsPadding(CarriedOnScorer):
    def score(self, context: LayerContext) -> Tensor:
        wrong = tuple(each / each.sum(dim=-1, keepdim=True) for each in context.layer.history)
        return super().score(with_layer(context, history=wrong))


class ByColumns(TurnedBackScorer):
    def score(self, context: LayerContext) -> Tensor:
        columns = torch.arange(context.key_len).expand_as(context.positions)
        return super().score(attrs.evolve(context, positions=columns))


class WeighsTheFirstHead(OutputScorer):
    def score(self, context: LayerContext) -> Tensor:
        assert context.layer.output_weight is not None
        first = context.layer.output_weight[:1].expand_as(context.layer.output_weight)
        return super().score(with_layer(context, output_weight=first))


class ChangesHistory(CarriedOnScorer):
    def score(self, context: LayerContext) -> Tensor:
        for each in context.layer.history:
            each.mul_(2.0)
        return super().score(context)


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (ReadsPadding(3), "must get the same saliency as"),
        (ByColumns(), "must get the same saliency as"),
        (WeighsTheFirstHead(), "must get the same saliency as"),
        (ChangesHistory(3), "must not modify the context"),
        (odd(WindowMaxPoolScorer, history_layers=-1)(), "history_layers must be"),
        (odd(WindowMaxPoolScorer, needs_rotary=1)(), "needs_rotary must be"),
        (odd(WindowMaxPoolScorer, needs_output_weight=None)(), "needs_output_weight must be"),
    ],
)
def test_the_contract_finds_what_is_wrong(scorer: Scorer, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_scorer(scorer)


def test_the_contract_finds_heads_of_one_process_that_are_taken_for_all() -> None:
    with pytest.raises(AssertionError, match="in the whole layer"):
        check_selector(OfTheseHeads(0.3, window_size=2))


@pytest.mark.parametrize(
    ("scorer", "selector", "propagation", "choosing", "remembered"),
    [
        (None, KeepAllSelector(), PassAllPropagation(), range(8), set()),
        (WINDOW, KeepAllSelector(), LargestOfLayers(layers=(5,)), range(8), {3, 4}),
        (WINDOW, KeepAllSelector(), LargestOfLayers(layers=(1, 5)), range(8), {0, 3, 4}),
        # The others slide, or recur.
        (WINDOW, KeepAllSelector(), LargestOfLayers(layers=(5,)), [0, 2, 5, 7], {0, 2}),
        (CarriedOnScorer(), KeepAllSelector(), PassAllPropagation(), [0, 3], {0, 3}),
        (WINDOW, RememberingSelector(), PassAllPropagation(), [1, 2], {1, 2}),
    ],
)
def test_layers_that_later_ones_look_at(
    scorer: Any, selector: Any, propagation: Any, choosing: list[int], remembered: set[int]
) -> None:
    policy = CachePolicy(scorer, selector, propagation)
    assert policy.remembered_layers(8, choosing) == remembered


def test_a_saliency_is_made_where_it_is_remembered() -> None:
    scorer = Noting()
    policy = CachePolicy(scorer, KeepAllSelector(), LargestOfLayers(layers=(2,)))
    assert policy.decide(context_of(1)).saliency is None
    assert not scorer.shown
    context = context_of(1)
    decision = policy.decide(context, remembered=True)
    assert decision.saliency is not None
    torch.testing.assert_close(decision.saliency, scorer.score(context._showing(8)))
    torch.testing.assert_close(policy.score(context), decision.saliency)
    assert decision.passed_on is None
    assert policy.decide(context_of(2)).passed_on is not None


def test_the_largest_of_the_layers_goes_on() -> None:
    """By hand: a token that only the layer before found salient."""
    context = context_of()
    history = torch.zeros(2, 6, 11)
    history[:, :, 4] = 100.0
    context = with_layer(context, history=(torch.zeros_like(history), history))
    part = LargestOfLayers(tsp_tokens=4, tsp_rate=None, window_size=3, layers=(2,))
    policy = CachePolicy(WindowMaxPoolScorer(3, kernel_size=1), KeepAllSelector(), part)
    passed = policy.decide(context).passed_on
    assert passed is not None
    assert passed.tolist() == [[4, 8, 9, 10]] * 2


def test_who_looks_back_needs_a_scorer() -> None:
    part = type("NeedsNone", (LargestOfLayers,), {"needs_saliency": False})()
    with pytest.raises(ValueError, match="scorer must be a Scorer, since .* of earlier layers"):
        CachePolicy(None, KeepAllSelector(), part)


def test_no_history_while_decoding_or_in_combinations() -> None:
    with pytest.raises(ValueError, match="must not read the saliency of earlier layers"):
        DecodingEviction(CarriedOnScorer(), GQAGroupSelector(retention_tokens=9))
    with pytest.raises(ValueError, match="scorers must not read the saliency of earlier layers"):
        MaxScorer([WindowMaxPoolScorer(), CarriedOnScorer()])


def test_what_wraps_and_what_is_staged_asks_for_the_same() -> None:
    assert ValueAwareScorer(CarriedOnScorer()).history_layers == 1
    assert ValueAwareScorer(TurnedBackScorer()).needs_rotary
    assert MaxScorer([WindowMaxPoolScorer(), OutputScorer()]).needs_output_weight
    assert StagedPropagation([LargestOfLayers(layers=(1,), back=4)]).history_layers == 4
    rule = DecodingEviction(TurnedBackScorer(), GQAGroupSelector(retention_tokens=9))
    assert (rule.needs_rotary, rule.needs_output_weight) == (True, False)
    # Only one that carries something from the prompt on is asked there.
    policy = CachePolicy(None, KeepAllSelector(), PassAllPropagation(), decoding=rule)
    assert not policy.needs_rotary


def test_a_restart_looks_back_too() -> None:
    class Back(RestartPropagation):
        history_layers = 1

        def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
            (before,) = context.layer.history
            return super().propagate(before, context)

    policy = CachePolicy(
        WindowMaxPoolScorer(1, kernel_size=1), KeepAllSelector(), Back(0.3, filter_layer=2)
    )
    assert policy.remembered_layers(5, range(5)) == {1}
    context = context_of()
    chosen = policy.decide_restart(context)
    assert chosen is not None
    own = RestartPropagation(filter_layer=2, retention_rate=0.3).propagate(
        context.layer.history[-1], context
    )
    assert torch.equal(chosen, own)


def test_a_selector_of_what_is_stored_gets_the_mean_of_all_heads() -> None:
    context = context_of()
    stored = (torch.zeros(2, 1, 11, 4), torch.zeros(2, 1, 11, 2))
    shown = attrs.evolve(context, stored=stored)._for_selector()
    torch.testing.assert_close(
        shown.layer.history[0], context.layer.history[0].mean(dim=1, keepdim=True)
    )
    assert (shown.layer.rotary, shown.layer.output_weight) == (None, None)


def test_plain_rotary_both_ways() -> None:
    """A pair of channels half a head apart, by the angle of its frequency, and back."""
    rotary: RotaryEmbedding = PlainRotary(4, theta=100.0)
    states = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    turned = rotary.turned(states, torch.tensor([[[5]]]))
    fast, slow = torch.tensor(5.0), torch.tensor(0.5)
    expected = [
        fast.cos() - 3 * fast.sin(),
        2 * slow.cos() - 4 * slow.sin(),
        3 * fast.cos() + fast.sin(),
        4 * slow.cos() + 2 * slow.sin(),
    ]
    torch.testing.assert_close(turned.flatten(), torch.stack(expected))
    torch.testing.assert_close(rotary.turned_back(turned, torch.tensor([[[5]]])), states)


@attrs.frozen
class Doubled(Scorer):
    """A scorer of a third party around another one, whose inputs it needs too."""

    scorer: Scorer = attrs.field(factory=OutputScorer)
    several: bool = True

    @property
    def inner_parts(self) -> Any:
        return (self.scorer,) if self.several else self.scorer

    def score(self, context: LayerContext) -> Tensor:
        return 2 * self.scorer.score(context)


def test_a_part_needs_what_the_parts_in_it_need() -> None:
    asks = "history_layers", "needs_rotary", "needs_output_weight"
    assert [getattr(Doubled(), name) for name in asks] == [0, False, True]
    assert [getattr(Doubled(KeyNormScorer()), name) for name in asks] == [0, False, False]
    assert Doubled(Doubled()).needs_output_weight
    check_scorer(Doubled())


def test_inner_parts_are_several() -> None:
    with pytest.raises(TypeError, match="iterable"):
        _ = Doubled(several=False).needs_rotary
    with pytest.raises(AssertionError, match="inner_parts must return a tuple of parts"):
        check_scorer(Doubled(several=False))
