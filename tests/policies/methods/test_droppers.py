"""Methods that drop tokens at several layers, or one, against slow loops; and their arguments."""

import attrs
import pytest

from kvpolicy import CachePolicy
from kvpolicy.policies import CLAA, LazyLLM, PromptDistill, SlimInfer, UniPrefill
from tests import reference
from tests.policies.scorers.support import random_layer
from tests.policies.views import new_of, view_of
from tests.reference import Method

LENS = (43, 18, 6)

CASES: list[tuple[CachePolicy, Method, int]] = [
    (PromptDistill(tsp_layer=1, tsp_rate=0.3), reference.PromptDistill(((1, 0.3),)), 8),
    (
        PromptDistill(tsp_rate=0.4, kernel_size=3, protect=3),
        reference.PromptDistill(((2, 0.4),), protect=3, kernel_size=3),
        8,
    ),
    (LazyLLM(), reference.LazyLLM(((1, 0.7), (3, 0.49), (6, 0.343))), 8),
    (
        LazyLLM(tsp_rate=0.5, tsp_layers=[4, 0], protect=2),
        reference.LazyLLM(((0, 0.5), (4, 0.25)), protect=2),
        8,
    ),
    (
        SlimInfer(tsp_rate=0.15, chunk_size=2, block_chunks=3),
        reference.SlimInfer(
            ((1, 0.6), (4, 0.3), (6, 0.15)), 4, protect=6, unit_size=2, block_units=3
        ),
        8,
    ),
    (
        UniPrefill(tsp_layers=[2, 5], mass=0.7, chunk_size=4, num_sinks=3, window_size=6),
        reference.UniPrefill((2, 5), 0.7, 4, num_sinks=3, window_size=6),
        8,
    ),
]


@pytest.mark.parametrize(("policy", "method", "num_layers"), CASES, ids=lambda each: str(each))
def test_what_goes_on_at_each_layer(policy: CachePolicy, method: Method, num_layers: int) -> None:
    dropped = 0
    for layer_idx in range(num_layers):
        context = random_layer(layer_idx, LENS, query_len=max(LENS))
        context = attrs.evolve(context, layer_idx=layer_idx, num_layers=num_layers)
        decision = policy.decide(context)
        for row, length in enumerate(LENS):
            choice = method.choose(view_of(context, row))
            assert choice.margin > 1e-6
            tokens = list(range(length))
            passed = decision.passed_on
            found = tokens if passed is None else new_of(passed[row], context, row)
            assert found == (tokens if choice.passed is None else choice.passed)
            dropped += length - len(found)
            assert choice.kept == [tokens] * 3
        assert (decision.kept >= 0).sum() == 3 * sum(LENS)
    assert dropped > 30


def test_layers_and_rates_by_default() -> None:
    assert PromptDistill().propagation.acting_layers(32) == {13}
    assert LazyLLM().propagation.acting_layers(32) == {8, 18, 27}
    assert SlimInfer().propagation.acting_layers(32) == {10, 20, 30}
    assert CLAA().propagation.acting_layers(32) == {15}
    assert CLAA(tsp_rate=0.2).selector.kept_rates(8) == [1.0] * 4 + [0.1] * 4
    rates = SlimInfer(tsp_rate=0.5).propagation.layer_rates(8)
    assert rates == [1.0] * 7 + [0.5]
    tokens = SlimInfer(tsp_tokens=2048).propagation.layer_rates(32, context_len=20480)
    assert [tokens[layer] for layer in (10, 11, 21, 31)] == [1.0, 0.4, 0.2, 0.1]
    assert UniPrefill().selector.kept_rates(2) == [1.0, 1.0]


def test_one_rate_is_kept_and_goes_on() -> None:
    assert (
        CLAA(tsp_layer=0, retention_rate=0.25).propagation.budget
        == CLAA(tsp_layer=0, tsp_rate=0.25).propagation.budget
    )
    assert CLAA(retention_tokens=9).propagation.budget.tokens == 9  # type: ignore[union-attr]
    assert CLAA(retention_tokens=9, tsp_rate=0.3).propagation.budget.rate == 0.3  # type: ignore[union-attr]
    bounded = CLAA(decoding=32).decoding
    assert bounded is not None
    assert bounded.most_tokens == 32
    written = "CLAA(decoding=32, retention_rate=0.1, whole_layers=2)"
    assert str(CLAA(decoding=32, whole_layers=2)) == written
