"""How many tokens go on may depend on what a prompt says."""

from typing import Any

import attrs
import pytest
import torch

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.policies import (
    GQAGroupSelector,
    StagedPropagation,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from kvpolicy.testing import check_propagation
from tests.integrations.support.content import Mass, MassPropagation
from tests.integrations.support.conversation import (
    FIRST_LENS,
    assert_alike,
    assert_as_reference,
    run_conversation,
)
from tests.reference import random_tokens, tiny_model

ROWS = tuple(range(len(FIRST_LENS)))
LAYERS = (0, 2)


def policy_of(layers: tuple[int, ...] = LAYERS, mass: float = 0.9) -> CachePolicy:
    return CachePolicy(
        WindowMaxPoolScorer(4, kernel_size=3),
        GQAGroupSelector(0.3, window_size=4),
        MassPropagation(layers, mass),
    )


def test_the_contract() -> None:
    check_propagation(MassPropagation())


class Undeclared(MassPropagation):
    @property
    def decides_by_content(self) -> bool:
        return False


class WithABudget(MassPropagation):
    @property
    def budget(self):  # type: ignore[no-untyped-def]
        return TokenSelectivePropagation().budget


@pytest.mark.parametrize(
    ("part", "message"),
    [(Undeclared, "unless decides_by_content"), (WithABudget, "budget must be None")],
)
def test_the_contract_wants_it_declared(part: type[MassPropagation], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_propagation(part())


@pytest.mark.parametrize("rows", [(0,), ROWS], ids=["single", "padded"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_against_the_reference(rows: tuple[int, ...], implementation: str) -> None:
    """Rows pass on unlike numbers, neither of them known before their layer is."""
    model = tiny_model("llama", seed=3, attn_implementation=implementation)
    method = Mass(0.3, window_size=4, kernel_size=3, layers=LAYERS)
    turns = assert_as_reference(model, policy_of(), method, rows)
    assert set(turns[0].propagated) == set(LAYERS)
    if len(rows) > 1:
        counts = {len(row) for row in turns[0].propagated[2]}
        assert len(counts) > 1


def test_layers_are_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number that goes on, since none is known beforehand; to the same result."""
    model, seen = tiny_model("llama", seed=3), []
    known = PassRun._narrows

    def few(run: PassRun, index: int, kwargs: dict[str, Any]) -> bool:
        seen.append((index, known(run, index, kwargs)))
        return seen[-1][1]

    monkeypatch.setattr(PassRun, "_narrows", few)
    _, narrow = run_conversation(model, policy_of(mass=0.999), rows=ROWS)
    assert {index for index, narrowed in seen if narrowed} == {*LAYERS, 3}  # 3 is for its logits
    monkeypatch.setattr(PassRun, "_narrows", lambda *_: False)
    _, whole = run_conversation(model, policy_of(mass=0.999), rows=ROWS)
    assert_alike(narrow, whole, 1e-5)


def test_all_may_go_on() -> None:
    model = tiny_model("llama", seed=3)
    cache = PolicyCache(policy_of(mass=1.0))
    with torch.no_grad(), cache.attached(model):
        model(torch.tensor([random_tokens(0, 40)]), cache=cache)
    assert all(len(each[0]) == 40 for each in cache.propagated.values())


def test_a_rate_is_not_known_before() -> None:
    for part in (MassPropagation(), StagedPropagation([MassPropagation((0,))])):
        policy = attrs.evolve(policy_of(), propagation=part)
        assert policy.propagation.decides_by_content
        with pytest.raises(ValueError, match="propagation must not decide by content"):
            policy.prefill_compute_rate(4)
