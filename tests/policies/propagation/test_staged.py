"""Propagation in several stages."""

from collections.abc import Sequence

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy import Budget, CachePolicy, LayerContext, PropagationPolicy
from kvpolicy.policies import (
    GQAGroupSelector,
    KeepAllSelector,
    LazyLLM,
    PassAllPropagation,
    PyramidPropagation,
    SlimInfer,
    StagedPropagation,
    TokenSelectivePropagation,
    WeightedTailScorer,
    WindowMaxPoolScorer,
)
from kvpolicy.testing import layer_contexts, saliencies
from tests.contexts import layer_context
from tests.policies.views import passed_by

TSP = TokenSelectivePropagation


def staged(*stages: PropagationPolicy) -> StagedPropagation:
    return StagedPropagation(stages)


@pytest.mark.parametrize(("num_layers", "layers"), [(32, {15, 23}), (36, {17, 26}), (6, {2, 3})])
def test_the_default_acts_after_half_and_three_quarters(num_layers: int, layers: set[int]) -> None:
    assert StagedPropagation().acting_layers(num_layers) == layers
    rates = StagedPropagation().layer_rates(num_layers)
    first, second = sorted(layers)
    assert rates[first : first + 2] == [1.0, 0.4]
    assert rates[second : second + 2] == [0.4, 0.2]


def test_a_layer_as_a_fraction_of_the_model() -> None:
    assert TSP(tsp_depth=0.5).acting_layers(33) == TSP().acting_layers(33) == {15}
    assert TSP(tsp_depth=1.0).acting_layers(7) == {6}
    assert TSP(tsp_depth=0.01).acting_layers(7) == {0}


def test_rates_are_the_lowest_so_far() -> None:
    # A later stage with more does not bring tokens back.
    part = staged(
        TSP(tsp_layer=2, tsp_rate=0.25),
        TSP(tsp_layer=0, tsp_rate=0.5),
        TSP(tsp_layer=3, tsp_rate=0.4),
    )
    assert part.layer_rates(6) == [1.0, 0.5, 0.5, 0.25, 0.25, 0.25]
    assert part.prefill_passes(6) == (part.layer_rates(6),)
    policy = CachePolicy(WindowMaxPoolScorer(), KeepAllSelector(), part)
    assert policy.prefill_compute_rate(6) == pytest.approx(2.75 / 6)
    tokens = staged(TSP(tsp_layer=0, tsp_tokens=30), TSP(tsp_layer=1, tsp_tokens=10))
    assert tokens.layer_rates(3, context_len=100) == [1.0, 0.3, 0.1]
    with pytest.raises(ValueError, match="context_len must be given if tsp_tokens is"):
        tokens.layer_rates(3)


@pytest.mark.parametrize(
    ("part", "num_layers", "remedy"),
    [
        (StagedPropagation(), 1, "give them layers of their own, or take a model of at least 3 l"),
        (StagedPropagation(), 2, "act after layer 0; .* or take a model of at least 3 l"),
        (staged(TSP(tsp_layer=0), TSP(tsp_depth=0.5)), 2, "take a model of at least 4 layers$"),
        (
            staged(TSP(tsp_layer=1, tsp_rate=0.5), TSP(tsp_layer=1, tsp_rate=0.2)),
            4,
            "act after layer 1; give them layers of their own$",
        ),
        (
            staged(TSP(tsp_layer=3), TSP(tsp_depth=0.5, tsp_rate=0.1)),
            8,
            "both .* and .* act after layer 3; give them layers",
        ),
    ],
)
def test_too_few_layers_for_the_stages(
    part: StagedPropagation, num_layers: int, remedy: str
) -> None:
    policy = CachePolicy(WindowMaxPoolScorer(), GQAGroupSelector(0.1), part)
    uses = policy.check_model, policy.prefill_compute_rate, part.acting_layers, part.layer_rates
    for use in uses:
        with pytest.raises(ValueError, match=f"in a model of {num_layers} layers.*{remedy}"):
            use(num_layers)


@pytest.mark.parametrize(
    ("policy", "num_layers", "eligible", "layers"),
    [
        # Where the defaults are three layers that see everything, they stay.
        (SlimInfer(), 32, range(32), [10, 20, 30]),
        # Those wanted of 4 layers are 0, 1 and 2; of 3 layers 0, 0 and 1.
        (SlimInfer(), 4, range(4), [0, 1, 2]),
        (SlimInfer(), 3, range(3), [0, 1, 2]),
        (SlimInfer(), 8, [3, 5, 7], [3, 5, 7]),
        # Those wanted of 8 layers are 1, 4 and 6: the nearest to the last one left were layer 0.
        (SlimInfer(), 8, [0, 2, 7], [0, 2, 7]),
        (SlimInfer(), 8, [0, 1, 2, 3, 7], [1, 3, 7]),
        (SlimInfer(), 32, [3, 7, 11, 15, 19, 23, 27, 31], [11, 19, 31]),
        (LazyLLM(), 32, [3, 7, 11, 15, 19, 23, 27, 31], [7, 19, 27]),
        (LazyLLM(), 4, [1, 2, 3], [1, 2, 3]),
    ],
)
def test_open_stages_take_layers_of_their_own_in_their_order(
    policy: CachePolicy, num_layers: int, eligible: Sequence[int], layers: list[int]
) -> None:
    placed = policy.propagation.placed(num_layers, eligible)
    assert isinstance(placed, StagedPropagation)
    found = [min(stage.acting_layers(num_layers)) for stage in placed.stages]
    assert found == layers
    assert placed.layer_rates(num_layers) == sorted(placed.layer_rates(num_layers), reverse=True)


def test_named_layers_are_left_to_their_stages() -> None:
    # The first, which wants layer 2, would take 3.
    part = staged(
        TSP(tsp_rate=0.6), TSP(tsp_layer=3, tsp_rate=0.3), TSP(tsp_rate=0.1, tsp_depth=0.75)
    )
    placed = part.placed(6, [1, 3, 5])
    assert isinstance(placed, StagedPropagation)
    assert [stage.acting_layers(6) for stage in placed.stages] == [{1}, {3}, {5}]
    named = staged(TSP(tsp_layer=0), TSP(tsp_layer=1))
    assert named.placed(6, [3, 5]) is named


def test_too_few_layers_that_see_the_whole_context() -> None:
    with pytest.raises(ValueError, match="stages must each drop after a layer of its own.*3 st"):
        SlimInfer().placed(4, [0, 2])
    with pytest.raises(ValueError, match=r"these are free: \[3\]; combine fewer"):
        staged(TSP(tsp_layer=1), TSP(), TSP(tsp_depth=0.75)).placed(8, [1, 3])


def test_what_the_stages_have_in_common() -> None:
    part = staged(
        TSP(tsp_layer=0, tsp_rate=0.5, window_size=4, protect=3),
        TSP(tsp_layer=1, tsp_rate=0.2, window_size=9, protect=2),
    )
    assert part.protected_tail == 4
    assert part.protected_first == 2
    assert part.needs_saliency
    assert not staged(PassAllPropagation()).needs_saliency
    assert not part.restarts


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (
            [
                TSP(tsp_layer=0, tsp_rate=0.5),
                TSP(tsp_layer=1, tsp_rate=0.2),
                TSP(tsp_layer=2, tsp_rate=0.3),
            ],
            Budget(0.2),
        ),
        ([TSP(tsp_layer=0, tsp_tokens=9), TSP(tsp_layer=1, tsp_tokens=10)], Budget(tokens=9)),
        ([TSP(tsp_layer=0, tsp_rate=0.5), TSP(tsp_layer=1, tsp_tokens=10)], None),
        ([TSP(tsp_layer=0, tsp_rate=0.5), PyramidPropagation()], None),
    ],
)
def test_the_smallest_budget_counts(
    stages: list[PropagationPolicy], expected: Budget | None
) -> None:
    assert StagedPropagation(stages).budget == expected


def test_a_policy_cannot_keep_more_than_the_last_stage_passes_on() -> None:
    stages = staged(TSP(tsp_layer=0, tsp_rate=0.5), TSP(tsp_layer=1, tsp_rate=0.2))
    CachePolicy(WindowMaxPoolScorer(), GQAGroupSelector(0.2), stages)
    with pytest.raises(ValueError, match="retention_rate must not exceed tsp_rate.*tsp_rate=0.2"):
        CachePolicy(WindowMaxPoolScorer(), GQAGroupSelector(0.3), stages)
    with pytest.raises(ValueError, match="window_size of .* must be at least 8"):
        CachePolicy(
            WindowMaxPoolScorer(),
            KeepAllSelector(),
            staged(TSP(tsp_layer=0), TSP(tsp_layer=1, window_size=4)),
        )


@given(data=st.data(), context=layer_contexts(0))
def test_where_a_stage_acts_it_alone_decides(data: st.DataObject, context: LayerContext) -> None:
    saliency = data.draw(saliencies(context))
    stages = {
        1: TSP(tsp_layer=1, tsp_rate=0.4, window_size=3),
        4: TSP(tsp_layer=4, tsp_rate=0.1, window_size=2, protect=5),
    }
    part = staged(*stages.values())
    for layer_idx in range(6):
        here = attrs.evolve(context, layer_idx=layer_idx, num_layers=6)
        passed = part.propagate(saliency, here)
        if layer_idx not in stages:
            assert passed is None
            continue
        alone = stages[layer_idx]
        expected = alone.propagate(saliency, here)
        assert (passed is None) == (expected is None)
        assert passed is None or torch.equal(passed, expected)
        assert torch.equal(part.protected(here), alone.protected(here))


def test_budgets_are_of_the_whole_context_on_paper() -> None:
    """20 of 100 tokens reached layer 3: 0.1 of the 100 go on, not of the 20."""
    context = layer_context(
        torch.zeros(1, 1, 20, 3),
        layer_idx=3,
        num_layers=5,
        positions=torch.arange(0, 100, 5)[None, None],
        seen_len=(100,),
    )
    part = staged(
        TSP(tsp_layer=1, tsp_rate=0.2, window_size=2), TSP(tsp_layer=3, tsp_rate=0.1, window_size=2)
    )
    passed = passed_by(part, torch.arange(20.0, 0, -1)[None, None], context)
    assert passed == [[0, 1, 2, 3, 4, 5, 6, 7, 18, 19]]
    assert part.propagate(None, attrs.evolve(context, layer_idx=4)) is None


def test_a_stage_may_act_at_many_layers() -> None:
    """PyramidInfer's propagation, which acts after every layer but the last, and one after that."""
    part = staged(PyramidPropagation(), TSP(tsp_layer=3, tsp_rate=0.1))
    assert part.acting_layers(4) == {0, 1, 2, 3}
    CachePolicy(WeightedTailScorer(), KeepAllSelector(), part).check_model(4)
    with pytest.raises(ValueError, match="both .* act after layer 3"):
        part.acting_layers(5)


def test_layers_that_fit_the_model() -> None:
    assert StagedPropagation().acting_layers(3) == {0, 1}
    assert staged(TSP(tsp_layer=3), TSP(tsp_depth=0.5)).acting_layers(10) == {3, 4}
    with pytest.raises(ValueError, match=r"tsp_layer must be in \[0, 3\]"):
        staged(TSP(tsp_layer=0), TSP(tsp_layer=4)).acting_layers(4)


@attrs.frozen
class Twice(PropagationPolicy):
    """Passes on the last token only, after layers 1 and 2; nests in other stages."""

    @property
    def needs_saliency(self) -> bool:
        return False

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        return frozenset({1, 2})

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        return torch.full((context.batch, 1), context.new_len - 1)


def test_a_users_own_stage_and_stages_within_stages() -> None:
    part = staged(Twice(), staged(TSP(tsp_layer=0), TSP(tsp_layer=3)))
    assert part.acting_layers(5) == {0, 1, 2, 3}
    assert part.needs_saliency
    assert part.budget is None
    assert hash(part) == hash(staged(Twice(), staged(TSP(tsp_layer=0), TSP(tsp_layer=3))))
