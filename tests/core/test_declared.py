"""The contract checks the type of everything that an author returns."""

from typing import Any

import attrs
import pytest
import torch

from kvpolicy import CachePolicy
from kvpolicy.attention import causal_attention_peaks
from kvpolicy.policies import (
    AccumulatedAttentionScorer,
    AdaptiveHeadSelector,
    GQAGroupSelector,
    KeepAllSelector,
    PassAllPropagation,
    RestartPropagation,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from kvpolicy.testing import check_propagation, check_scorer, check_selector
from kvpolicy.testing.contract import check_kept
from tests.core.odd import odd, with_method, with_property
from tests.policies.scorers.support import layer_of


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_queries", 8.0),
        ("num_queries", True),
        ("num_queries", -1),
        ("unscored_tail", None),
        ("unscored_tail", "8"),
    ],
)
def test_properties_of_a_scorer(name: str, value: object) -> None:
    with pytest.raises(AssertionError, match=f"{name} must be an int of at least 0.* got"):
        check_scorer(with_property(WindowMaxPoolScorer, name, value)())


SHARED = [
    ("needs_saliency", 1, "True or False"),
    ("protected_tail", 8.0, "an int of at least 0"),
    ("protected_tail", None, "an int of at least 0"),
    ("protected_first", -1, "an int of at least 0"),
    ("protected_first", False, "an int of at least 0"),
]
OF_A_SELECTOR = [*SHARED, ("equal_counts", 1, "True or False"), ("unequal_heads", 0, "True or F")]
OF_PROPAGATION = [
    *SHARED,
    ("restarts", 0, "True or False"),
    ("decides_by_content", None, "True or False"),
]


@pytest.mark.parametrize(
    ("check", "base", "name", "value", "wanted"),
    [
        *((check_selector, GQAGroupSelector, *each) for each in OF_A_SELECTOR),
        *((check_propagation, TokenSelectivePropagation, *each) for each in OF_PROPAGATION),
    ],
)
def test_properties_of_the_other_parts(
    check: Any, base: Any, name: str, value: object, wanted: str
) -> None:
    with pytest.raises(AssertionError, match=f"{name} must be {wanted}.*, got {value}"):
        check(with_property(base, name, value)())


def test_equal_counts_are_equal() -> None:
    shares = with_property(AdaptiveHeadSelector, "equal_counts", True)()
    with pytest.raises(AssertionError, match="must keep equally many tokens in all heads of a row"):
        check_selector(shares)


def test_a_budget_is_one() -> None:
    message = "budget must be a Budget, or None where no one number holds, got 0.1"
    with pytest.raises(AssertionError, match=message):
        check_selector(with_property(KeepAllSelector, "budget", 0.1)())
    with pytest.raises(AssertionError, match=message):
        check_propagation(with_property(PassAllPropagation, "budget", 0.1)())


RETURNED_BY_SELECTORS = [
    ("select", lambda found: found.tolist(), "kept .* must be a tensor"),
    ("select", lambda found: None, "kept .* must be a tensor, got None"),
    ("select", lambda found: found.int(), "kept .* must be torch.int64, got torch.int32"),
    ("select", lambda found: found[0], "kept .* must be of shape"),
    ("protected", lambda found: found.int(), "protected .* must be torch.bool"),
    ("protected", lambda found: found[:, :1, :0], "protected .* must be of shape"),
    ("protected", lambda found: found.tolist(), "protected .* must be a tensor"),
    ("kept_rates", tuple, "kept_rates must return a list of numbers"),
    ("kept_rates", lambda found: 0.1, "kept_rates must return a list of numbers, got 0.1"),
    ("kept_rates", lambda found: ["0.1"] * len(found), "must return a list of numbers"),
    ("kept_rates", lambda found: found[1:], r"kept_rates must be 1 fractions in \(0, 1\]"),
]
RETURNED_BY_PROPAGATION = [
    ("acting_layers", tuple, r"acting_layers must return a frozenset of ints, got \(3,\)"),
    ("acting_layers", list, "acting_layers must return a frozenset"),
    ("acting_layers", set, "acting_layers must return a frozenset"),
    ("acting_layers", lambda found: None, "acting_layers must return a frozenset"),
    ("acting_layers", lambda found: frozenset({3.0}), "acting_layers must return a frozenset"),
    ("layer_rates", tuple, "layer_rates must return a list of numbers"),
    ("layer_rates", torch.tensor, "layer_rates must return a list of numbers"),
    ("layer_rates", lambda found: [True, *found[1:]], "layer_rates must return a list"),
    ("prefill_passes", list, "prefill_passes must return a tuple of lists"),
    ("prefill_passes", lambda found: found * 2, "prefill_passes must hold 1 pass"),
    ("prefill_passes", lambda found: (tuple(found[0]),), "prefill_passes must return a list"),
    ("prefill_passes", lambda found: ([0.5] * 8,), "prefill_passes must end with layer_rates"),
    ("placed", lambda found: None, "placed must return a PropagationPolicy, got None"),
    ("placed", lambda found: attrs.evolve(found, tsp_layer=1), "placed must change nothing if"),
    ("propagate", lambda found: [[0]], "passed_on .* must be a tensor"),
    ("propagate", lambda found: torch.ones(1, 1), "passed_on .* must be torch.int64"),
    ("propagate", lambda found: torch.ones(7).long(), "passed_on .* must be of shape"),
    ("protected", lambda found: found.tolist(), "protected .* must be a tensor"),
    ("protected", lambda found: found.float(), "protected .* must be torch.bool"),
]


@pytest.mark.parametrize(
    ("check", "base", "name", "returns", "message"),
    [
        (
            check_scorer,
            WindowMaxPoolScorer,
            "score",
            lambda found: found.numpy(),
            "saliency must be a tensor, got",
        ),
        *((check_selector, GQAGroupSelector, *each) for each in RETURNED_BY_SELECTORS),
        *(
            (check_propagation, TokenSelectivePropagation, *each)
            for each in RETURNED_BY_PROPAGATION
        ),
    ],
)
def test_what_methods_return(check: Any, base: Any, name: str, returns: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(with_method(base, name, returns)())


def test_a_restart_has_two_passes() -> None:
    restart = with_method(RestartPropagation, "prefill_passes", lambda found: found[1:])()
    with pytest.raises(AssertionError, match="must hold 2 passes where restarts is True, got 1"):
        check_propagation(restart)


def test_a_policy_says_at_once_that_acting_layers_are_no_frozenset() -> None:
    propagation = with_method(TokenSelectivePropagation, "acting_layers", tuple)()
    policy = CachePolicy(WindowMaxPoolScorer(), KeepAllSelector(), propagation)
    with pytest.raises(TypeError, match="acting_layers of Odd.* must return a frozenset .* got"):
        policy.check_model(8)


def test_what_scorers_declare_of_saliencies() -> None:
    peaks = odd(
        AccumulatedAttentionScorer, score=lambda self, context: causal_attention_peaks(context)
    )
    check_scorer(peaks())  # what is declared of the parent's score is not believed
    few = with_property(AccumulatedAttentionScorer, "num_queries", 4)
    for kind, message in ((peaks, "queries in two parts"), (few, "num_queries=4")):
        with pytest.raises(AssertionError, match=message):
            check_scorer(with_property(kind, "accumulates", True)())


def test_what_selectors_declare_of_what_they_keep() -> None:
    context = layer_of(torch.zeros(53, 5))
    saliency = torch.linspace(1.0, 0.0, 53).expand(1, 1, 53)
    given = {"retention_rate": 0.5}
    kept = GQAGroupSelector(**given).select(saliency, context)
    check_kept(GQAGroupSelector(**given), context, kept)
    whole = with_property(GQAGroupSelector, "keeps_all", True)(**given)
    with pytest.raises(AssertionError, match="keeps_all must keep every token"):
        check_kept(whole, context, kept)
