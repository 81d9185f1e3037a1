"""Arguments of methods that drop tokens at several layers, or one."""

from kvpolicy.policies import (
    CLAA,
    LastQueryProductScorer,
    LazyLLM,
    PromptDistill,
    SlimInfer,
    UniPrefill,
)


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
    unordered = LazyLLM(tsp_rate=0.5, tsp_layers=[4, 0], protect=2).propagation
    assert unordered.layer_rates(6) == [1.0] + [0.5] * 4 + [0.25]
    assert unordered.protected_first == 2
    distill = PromptDistill(tsp_rate=0.4, kernel_size=3, protect=3)
    assert distill.scorer == LastQueryProductScorer(kernel_size=3, own=False)
    assert distill.propagation.protected_first == 3


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
