"""What parts answer is looked at behind the last layer: nothing wrong passes, nothing is lost."""

import weakref
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, KVSelector, LayerContext, Scorer
from kvpolicy.host_counts import known_counts
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.layer_inputs import AttentionSettings
from kvpolicy.policies import (
    AdaptiveHeadSelector,
    GQAGroupSelector,
    KeepAllSelector,
    PassAllPropagation,
    SnapKV,
    WindowMaxPoolScorer,
)
from tests.reference import random_tokens, tiny_model

FIRST = 41
WRONG_AT = 2 * FIRST  # tokens seen when parts are wrong


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=3)


def read(model: PreTrainedModel, cache: PolicyCache, seed: int, length: int = FIRST) -> Tensor:
    ids = torch.tensor([random_tokens(seed, length)])
    with cache.attached(model), torch.no_grad():
        if cache.get_seq_length():
            cache.start_turn()
        logits: Tensor = model(input_ids=ids, cache=cache).logits
    return logits


@attrs.frozen
class Wrong(GQAGroupSelector):
    """Keeps as many tokens as it says, and others than there are, at one layer in a later turn."""

    at: int = attrs.field(default=1, kw_only=True)
    how: str = attrs.field(default="outside", kw_only=True)

    def kept_counts(self, context: LayerContext) -> tuple[int, ...] | None:
        return super().kept_counts(context)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        kept = super().select(saliency, context)
        if not self._now(context):
            return kept
        if self.how == "outside":
            kept[:, :, -1] = 10**9
        elif self.how == "unordered":
            kept = kept.flip(-1)
        elif self.how == "fewer":  # of as many slots
            kept[:, 1, 0] = -1
        elif self.how == "wider":
            kept = pad(kept, (1, 0), value=-1)
        return kept

    def _now(self, context: LayerContext) -> bool:
        return context.layer_idx == self.at and context.seen_len[0] == WRONG_AT


@attrs.frozen
class NoNumber(WindowMaxPoolScorer):
    at: int = 2

    def score(self, context: LayerContext) -> Tensor:
        found = super().score(context)
        if context.layer_idx == self.at and context.seen_len[0] == WRONG_AT:
            found[0, 0, 3] = torch.nan
        return found


@attrs.frozen
class NoTensor(WindowMaxPoolScorer):
    def score(self, context: LayerContext) -> Any:
        late = context.layer_idx == 3 and context.seen_len[0] == WRONG_AT
        return None if late else super().score(context)


def policy_of(
    selector: KVSelector | None = None, scorer: Scorer | None = None, **more: Any
) -> CachePolicy:
    parts = scorer or WindowMaxPoolScorer(), selector or GQAGroupSelector(0.3)
    return CachePolicy(*parts, PassAllPropagation(), **more)


WRONG: dict[str, tuple[CachePolicy, str]] = {
    "outside": (policy_of(Wrong(0.3)), r"indices of Wrong.* in \[0, .* got .*1000000000"),
    "unordered": (policy_of(Wrong(0.3, how="unordered")), "must be ascending, unique"),
    "fewer": (policy_of(Wrong(0.3, how="fewer")), "kept_counts of Wrong.* must return how many"),
    "wider": (policy_of(Wrong(0.3, how="wider")), "kept_counts of Wrong.* must return how many"),
    "no_number": (policy_of(scorer=NoNumber()), "score of NoNumber.* got NaN at layer 2"),
    "gapless": (policy_of(Wrong(0.3), gapless=True), "indices of Wrong.* must be ascending"),
    # The first layer's mistake comes first, whatever it makes of later ones.
    "first": (policy_of(Wrong(0.3), NoTensor()), "indices of Wrong.* must be ascending"),
    "before": (policy_of(Wrong(0.3, at=3), NoNumber()), "got NaN at layer 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_found_and_nothing_is_lost(model: PreTrainedModel, name: str) -> None:
    policy, message = WRONG[name]
    right = SnapKV(0.3) if not policy.gapless else policy_of(gapless=True)
    cache, other = PolicyCache(policy), PolicyCache(right)
    assert torch.equal(read(model, cache, 0), read(model, other, 0))
    with pytest.raises(ValueError, match=message):
        read(model, cache, 1)
    assert cache.get_seq_length() == FIRST
    for layer, own in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(layer.keys, own.keys)
        assert torch.equal(layer.positions, own.positions)
    assert torch.equal(read(model, cache, 2, 29), read(model, other, 2, 29))


def test_a_type_that_is_wrong_is_told_at_once(model: PreTrainedModel) -> None:
    cache = PolicyCache(policy_of(scorer=NoTensor()))
    read(model, cache, 0)
    with pytest.raises(TypeError, match="must return a tensor of floats, got None"):
        read(model, cache, 1)


@attrs.frozen
class Inherits(GQAGroupSelector):
    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        return super().select(saliency, context)[..., 3:]


@attrs.frozen
class ProtectsAll(GQAGroupSelector):
    def protected(self, context: LayerContext) -> Tensor:
        return context.valid


@pytest.mark.parametrize("kind", [Inherits, ProtectsAll])
def test_who_inherits_what_is_said_is_not_asked(
    model: PreTrainedModel, kind: type[GQAGroupSelector]
) -> None:
    cache = PolicyCache(policy_of(kind(0.5)))
    read(model, cache, 0)
    assert [layer.kept_len for layer in cache.layers] == [17 if kind is Inherits else FIRST] * 4


@attrs.frozen
class Watching(WindowMaxPoolScorer):
    """Counts how many layers' keys there are when another is scored."""

    alive: list[Any] = attrs.field(factory=list, eq=False)
    found: list[int] = attrs.field(factory=list, eq=False)

    def score(self, context: LayerContext) -> Tensor:
        self.found.append(sum(each() is not None for each in self.alive))
        self.alive.append(weakref.ref(context.keys))
        return super().score(context)


@pytest.mark.parametrize("selector", [GQAGroupSelector(0.2), AdaptiveHeadSelector(0.2)])
def test_no_layers_keys_wait_for_the_look(model: PreTrainedModel, selector: KVSelector) -> None:
    watching = Watching()
    read(model, PolicyCache(policy_of(selector, watching)), 0)
    assert watching.found == [0] * 4


def context_of(held: int, seen: int) -> LayerContext:
    return LayerContext(
        layer_idx=0,
        num_layers=4,
        queries=torch.zeros(1, 2, 0, 5),
        keys=torch.zeros(1, 1, held, 5),
        values=torch.zeros(1, 1, held, 5),
        positions=torch.arange(seen - held, seen).expand(1, 1, held),
        new_valid=torch.ones(1, held, dtype=torch.bool),
        seen_len=(seen,),
        attention=AttentionSettings(1.0),
        held_len=(held,),
    )


def test_what_is_known_by_hand() -> None:
    """10 tokens of 10, and 10 of 100, of which the first were evicted."""
    for selector, whole, part in (
        (KeepAllSelector(), 10, 10),
        (GQAGroupSelector(0.5), 8, 10),
        (GQAGroupSelector(0.05, window_size=3), 3, 5),
        (GQAGroupSelector(0.05, window_size=3, protect=2), 5, 5),
        (GQAGroupSelector(0.01, window_size=3, protect=2), 5, None),  # protects 3 to 5
        (AdaptiveHeadSelector(0.5), None, None),
    ):
        counts = [known_counts(selector, context_of(10, seen)) for seen in (10, 100)]
        assert counts == [None if each is None else (each,) for each in (whole, part)], selector
        unknown = attrs.evolve(context_of(10, 10), held_len=None)
        assert known_counts(selector, unknown) is None


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_a_model_that_is_not_of_numbers_is_found(name: str) -> None:
    """The library's own parts are not looked at layer by layer, but nothing is kept by NaN."""
    broken = tiny_model("llama", seed=3)
    cache, policy = PolicyCache(SnapKV(0.3)), SnapKV(0.3)
    read(broken, cache, 0)
    with torch.no_grad():
        getattr(broken.model.layers[1].self_attn, name).weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="score of WindowMaxPoolScorer.* look for NaN"):
        read(broken, cache, 1)
    assert cache.get_seq_length() == FIRST
    assert policy._is_tested(policy.scorer)
    assert not policy_of(scorer=NoNumber())._is_tested(NoNumber())
