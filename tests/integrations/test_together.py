"""Many policies that read a prompt together, each beside the same policy that has read it alone."""

import inspect
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, registered
from kvpolicy.integrations.transformers import PolicyCache, read_together
from kvpolicy.policies import (
    SnapKV,
)
from tests.integrations.situations.models import KINDS, PLAIN, model_of
from tests.integrations.situations.policies import BOUNDS, GAPLESS, TOGETHER

# Tokens of the prompts' rows, and of the second turn.
LENGTHS, SECOND = (59, 31), 9
TOLERANCE = 1e-5

# Two budgets of every method, by the arguments that it takes.
BUDGETS: tuple[dict[str, Any], ...] = (
    {"retention_rate": 0.2, "tsp_rate": 0.4, "window_size": 4},
    {"retention_rate": 0.45, "tsp_rate": 0.7, "window_size": 4},
)
OF_METHODS: dict[str, dict[str, Any]] = {
    "pyramidinfer": {"min_context": 8},
    "lagkv": {"lag_size": 8},
    "kvzip": {"chunk_size": 19, "window_size": 0},
    "replaykv": {"tsp_rate": 1.0, "window_size": 0},
    "uniprefill": {"mass": 0.8, "chunk_size": 4, "num_sinks": 4},
    "sliminfer": {"chunk_size": 4, "block_chunks": 2},
}


def methods(budget: int) -> dict[str, CachePolicy]:
    """All registered methods at one of the budgets."""
    found = {}
    for name, factory in registered("policy").items():
        takes = inspect.signature(factory).parameters
        given = {**BUDGETS[budget], **OF_METHODS.get(name, {})}
        built = factory(**{key: value for key, value in given.items() if key in takes})
        assert isinstance(built, CachePolicy)
        found[f"{name} {budget}"] = built
    return found


def all_methods() -> dict[str, CachePolicy]:
    return methods(0) | methods(1)


def others() -> dict[str, CachePolicy]:
    """What no method does by itself: gapless, joint choices, bounded answers."""
    bounded = {name: SnapKV(0.4, decoding=rule) for name, (rule, _) in BOUNDS.items()}
    return {name: policy for name, (policy, _) in {**GAPLESS, **TOGETHER}.items()} | bounded


def prompt(rows: int, length: int = 0, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Ids and mask of rows of `LENGTHS` tokens, or all of one length, padded on the left."""
    width = length or max(LENGTHS[:rows])
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (rows, width), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows if not length else 0):
        mask[row, : width - LENGTHS[row]] = 0
    return ids * mask, mask


@torch.no_grad()
def read_alone(
    model: PreTrainedModel, policy: CachePolicy, ids: Tensor, mask: Tensor | None
) -> tuple[PolicyCache, Tensor]:
    alone = PolicyCache(policy)
    with alone.attached(model):
        output: Any = model(ids, attention_mask=mask, cache=alone)
    return alone, output.logits[:, -1]


@torch.no_grad()
def forward(model: PreTrainedModel, held: PolicyCache, ids: Tensor, mask: Tensor) -> Tensor:
    with held.attached(model):
        output: Any = model(ids, attention_mask=mask, cache=held)
    return output.logits


@attrs.define
class Pair:
    """A cache that has read together with others, and one that has read alone.

    Attributes:
        model: the model.
        together: the one cache.
        alone: the other.
        mask: of all columns so far.
        tolerance: the largest difference of logits, relative to the largest of them.
    """

    model: PreTrainedModel
    together: PolicyCache
    alone: PolicyCache
    mask: Tensor
    tolerance: float = TOLERANCE

    def check_held(self) -> None:
        one, other = self.together, self.alone
        assert len(one.layers) == len(other.layers) > 0
        for layer, want in zip(one.layers, other.layers, strict=True):
            assert type(layer) is type(want)
            assert layer.tokens is one.layers[0].tokens
            if want.positions is None:
                assert layer.positions is None
            else:
                assert torch.equal(layer.positions, want.positions)
        assert one.propagated.keys() == other.propagated.keys()
        for index, passed in other.propagated.items():
            assert torch.equal(one.propagated[index], passed)
        assert one.seen_lengths == other.seen_lengths
        assert one.get_seq_length() == other.get_seq_length()
        assert one.report() == other.report()

    def check_close(self, got: Tensor, want: Tensor) -> None:
        assert got.shape == want.shape
        apart = float((got - want).abs().max() / want.abs().max().clamp(min=1))
        assert apart <= self.tolerance, apart

    def step(self, ids: Tensor) -> Tensor:
        """Reads tokens with both; returns the next ones, which must be the same."""
        self.mask = torch.cat([self.mask, torch.ones_like(ids)], dim=1)
        got, want = (
            forward(self.model, each, ids, self.mask) for each in (self.together, self.alone)
        )
        self.check_close(got, want)
        assert torch.equal(got[:, -1].argmax(-1), want[:, -1].argmax(-1))
        return want[:, -1:].argmax(-1)

    def answer(self, first: Tensor, count: int = 3) -> None:
        following = first
        for _ in range(count):
            following = self.step(following)
        self.check_held()

    def second_turn(self) -> None:
        ids, _ = prompt(self.mask.shape[0], SECOND, seed=8)
        self.together.start_turn()
        self.alone.start_turn()
        self.answer(self.step(ids))


def check_alike(
    model: PreTrainedModel,
    policies: Mapping[str, CachePolicy],
    ids: Tensor,
    mask: Tensor,
    tolerance: float = TOLERANCE,
    *,
    turns: bool = True,
) -> None:
    """Asserts that caches that have read together are as if alone, now and in what follows."""
    caches = read_together(model, ids, policies, mask)
    assert list(caches) == list(policies) == sorted(caches.logits, key=list(policies).index)
    for name, policy in policies.items():
        alone, logits = read_alone(model, policy, ids, mask)
        pair = Pair(model, caches[name], alone, mask, tolerance)
        pair.check_held()
        pair.check_close(caches.logits[name], logits)
        pair.answer(logits.argmax(dim=-1, keepdim=True))
        if turns:
            pair.second_turn()


@pytest.mark.parametrize("rows", [1, 2])
def test_other_policies_are_as_if_alone(rows: int) -> None:
    check_alike(model_of("llama"), others(), *prompt(rows))


def accepted(
    model: PreTrainedModel, policies: Mapping[str, CachePolicy], ids: Tensor, mask: Tensor
) -> tuple[dict[str, CachePolicy], dict[str, tuple[CachePolicy, Exception]]]:
    """The policies that may read a prompt of a model alone, and the others with their errors."""
    can, cannot = {}, {}
    for name, policy in policies.items():
        try:
            read_alone(model, policy, ids, mask)
        except ValueError as error:
            cannot[name] = policy, error
        else:
            can[name] = policy
    return can, cannot


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", [*PLAIN, *KINDS])
def test_methods_on_models_of_every_kind(name: str, rows: int) -> None:
    model = model_of(name)
    ids, mask = prompt(rows)
    policies = all_methods() if name in PLAIN else methods(rows - 1)
    can, cannot = accepted(model, policies, ids, mask)
    check_alike(model, can, ids, mask, turns=rows == 1 or name in PLAIN)
    for refused, (policy, error) in cannot.items():
        with pytest.raises(type(error)) as raised:
            read_together(model, ids, {**can, refused: policy}, mask)
        assert str(raised.value) == f"policy {refused!r}: {error}"
    assert not model._forward_pre_hooks
