"""What later layers see of what earlier ones found salient."""

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, LayerContext, PropagationPolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.policies import (
    GQAGroupSelector,
    KeepAllSelector,
    PassAllPropagation,
    RestartPropagation,
    StagedPropagation,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from tests.families import FAMILIES
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.support.asking import CarriedOnScorer, LargestOfLayers, RememberingSelector
from tests.integrations.support.conversation import left_padded, run_conversation
from tests.reference import Method, random_tokens, tiny_model
from tests.reference.history import LookingBack

SCORER, SELECTOR = WindowMaxPoolScorer(4, kernel_size=3), GQAGroupSelector(0.3, window_size=4)
HALF = TokenSelectivePropagation(tsp_layer=1, tsp_rate=0.5, window_size=4)
SNAPKV: dict[str, Any] = {"retention_rate": 0.3, "window_size": 4, "kernel_size": 3}

POLICIES: dict[str, tuple[CachePolicy, Method]] = {
    "passing": (
        CachePolicy(SCORER, SELECTOR, LargestOfLayers(0.4, window_size=4, layers=(2,))),
        LookingBack(**SNAPKV, passing=2, rates=((2, 0.4),)),
    ),
    "keeping_all": (
        CachePolicy(SCORER, KeepAllSelector(), LargestOfLayers(0.3, window_size=4, layers=(2,))),
        LookingBack(**SNAPKV, passing=2, rates=((2, 0.3),), keeps=True),
    ),
    "behind_a_drop": (  # after layer 0, which has nothing behind it
        CachePolicy(
            SCORER,
            SELECTOR,
            StagedPropagation(
                [
                    TokenSelectivePropagation(tsp_layer=0, tsp_rate=0.7, window_size=4),
                    LargestOfLayers(0.35, window_size=4, layers=(2,)),
                ]
            ),
        ),
        LookingBack(**SNAPKV, passing=2, rates=((0, 0.7), (2, 0.35))),
    ),
    "scoring": (
        CachePolicy(CarriedOnScorer(4, kernel_size=3), SELECTOR, HALF),
        LookingBack(**SNAPKV, carried_on=0.5, rates=((1, 0.5),)),
    ),
    "selecting": (
        CachePolicy(SCORER, RememberingSelector(0.3, window_size=4), HALF),
        LookingBack(**SNAPKV, selecting=3, rates=((1, 0.5),)),
    ),
}


def test_looking_back_changes_what_goes_on() -> None:
    """The tests above could not pass without any history."""
    model = tiny_model("llama", seed=3)
    for name, (policy, _) in POLICIES.items():
        without = {
            "scorer": SCORER,
            "selector": KeepAllSelector() if name == "keeping_all" else SELECTOR,
        }
        propagation: PropagationPolicy = policy.propagation
        if name in ("passing", "keeping_all"):
            propagation = attrs.evolve(policy.propagation, back=0)
        if name == "behind_a_drop":
            first, second = policy.propagation.stages
            propagation = StagedPropagation([first, attrs.evolve(second, back=0)])
        _, turns = run_conversation(model, policy, rows=(0,))
        _, plain = run_conversation(
            model, attrs.evolve(policy, **without, propagation=propagation), rows=(0,)
        )
        assert (turns[0].kept, turns[0].propagated) != (plain[0].kept, plain[0].propagated), name


@attrs.frozen
class Noting(WindowMaxPoolScorer):
    """Notes the saliency of each layer's new tokens, by position, and what it is shown."""

    notes: list[tuple[int, dict[tuple[int, int], Tensor]]] = attrs.field(factory=list, eq=False)
    shown: list[tuple[LayerContext, Tensor]] = attrs.field(factory=list, eq=False)

    @property
    def history_layers(self) -> int:
        return 2

    def score(self, context: LayerContext) -> Tensor:
        saliency = super().score(context)
        self.notes.append((context.layer_idx, by_position(saliency, context)))
        self.shown.append((context, saliency))
        return saliency


def by_position(saliency: Tensor, context: LayerContext) -> dict[tuple[int, int], Tensor]:
    """By row and position, ``[heads]``, of the new tokens."""
    held, found = context.key_len - context.new_len, {}
    for row in range(context.batch):
        for slot in range(context.new_len):
            if context.new_valid[row, slot]:
                place = int(context.positions[row, 0, held + slot])
                column = slot if saliency.shape[2] == context.new_len else held + slot
                found[row, place] = saliency[row, :, column]
    return found


def check_history(scorer: Noting, choosing: list[int]) -> None:
    """Each layer was shown what the two choosing layers before gave its tokens."""
    notes = dict(scorer.notes)
    assert [context.layer_idx for context, _ in scorer.shown] == choosing
    for place, (context, _) in enumerate(scorer.shown):
        before = choosing[max(place - 2, 0) : place]
        assert len(context.layer.history) == len(before)
        for layer, each in zip(before, context.layer.history, strict=True):
            assert each.dtype == torch.float32
            assert each.shape[2] == context.new_len
            for at, given in by_position(each, context).items():
                assert torch.equal(given, notes[layer][at])
            assert not each.masked_fill(context.new_valid[:, None], 0.0).any()


def read(model: PreTrainedModel, policy: CachePolicy, lens: tuple[int, ...] = (50, 41)) -> None:
    ids, mask = left_padded([random_tokens(row, length) for row, length in enumerate(lens)])
    cache = PolicyCache(policy)
    with torch.no_grad(), cache.attached(model):
        model(ids, attention_mask=mask, cache=cache, logits_to_keep=1)


@attrs.frozen
class AsksNothing(WindowMaxPoolScorer):
    asked: list[int] = attrs.field(factory=list, eq=False)

    def score(self, context: LayerContext) -> Tensor:
        self.asked.append(context.layer_idx)
        return super().score(context)


def choosing_layers(model: PreTrainedModel) -> list[int]:
    """Where a scorer is asked that looks at nothing else."""
    scorer = AsksNothing()
    read(model, CachePolicy(scorer, GQAGroupSelector(0.9), PassAllPropagation()))
    return scorer.asked


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "deepseek_v2", "falcon_h1", "gemma3n"])
def test_layers_of_all_kinds(name: str, drops: bool) -> None:
    """Sliding windows, recurrences and borrowers give none, and are skipped."""
    model = builds()[name].model() if name in builds() else FAMILIES[name].build()
    at = ModelParts(model).eligible[0]
    part = TokenSelectivePropagation(tsp_layer=at, tsp_rate=0.4) if drops else PassAllPropagation()
    choosing, scorer = choosing_layers(model), Noting()
    read(model, CachePolicy(scorer, GQAGroupSelector(0.3), part))
    assert len(choosing) > 1
    check_history(scorer, choosing)
    behind = [context.new_len for context, _ in scorer.shown if context.layer_idx > at]
    assert set(behind) == {20 if drops else 50}


@pytest.mark.parametrize("size", [13, 50])
def test_a_prompt_in_chunks(size: int) -> None:
    """The history is of the whole prompt."""
    model, scorer = tiny_model("llama", seed=3), Noting()
    ids = torch.tensor([random_tokens(0, 50)])
    cache = PolicyCache(CachePolicy(scorer, GQAGroupSelector(0.3), PassAllPropagation()))
    with torch.no_grad(), cache.attached(model):
        cache.start_turn(prompt_len=50)
        for start in range(0, 50, size):
            model(ids[:, start : start + size], cache=cache)
    check_history(scorer, [0, 1, 2, 3])
    assert all(context.new_len == 50 for context, _ in scorer.shown)


def test_a_restart_looks_at_the_pass_that_chooses() -> None:
    shown: list[Tensor] = []

    class Back(RestartPropagation):
        history_layers = 2

        def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
            assert saliency is not None
            shown.extend((*context.layer.history, saliency))
            return super().propagate(saliency + context.layer.history[0], context)

    model, scorer = tiny_model("llama", seed=3), Noting()
    read(model, CachePolicy(scorer, GQAGroupSelector(0.3), PassAllPropagation()))
    policy = CachePolicy(
        WindowMaxPoolScorer(),
        KeepAllSelector(),
        Back(filter_layer=2, retention_rate=0.4, window_size=8),
    )
    read(model, policy)
    for (_, want), given in zip(scorer.shown, shown, strict=False):
        # Of padding it gives nothing.
        places = scorer.shown[0][0].new_valid[:, None].expand_as(want)
        torch.testing.assert_close(given[places], want[places])
    assert len(shown) == 3


def test_only_as_many_as_asked_are_held_and_none_behind_the_forward() -> None:
    model, scorer = tiny_model("llama", seed=3, num_layers=6), Noting()
    cache = PolicyCache(CachePolicy(scorer, GQAGroupSelector(0.3), PassAllPropagation()))
    with torch.no_grad(), cache.attached(model):
        model(torch.tensor([random_tokens(0, 50)]), cache=cache)
        assert cache._reader.run is None
    assert [len(context.layer.history) for context, _ in scorer.shown] == [0, 1, 2, 2, 2, 2]


def test_nothing_is_remembered_where_nobody_asks() -> None:
    model, scorer = tiny_model("llama", seed=3), AsksNothing()
    read(model, CachePolicy(scorer, KeepAllSelector(), PassAllPropagation()))
    assert scorer.asked == []
    read(model, CachePolicy(scorer, KeepAllSelector(), LargestOfLayers(layers=(2,), back=1)))
    assert scorer.asked == [1, 2]
