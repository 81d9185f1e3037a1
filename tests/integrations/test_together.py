"""Many policies that read a prompt together, each beside the same policy that has read it alone."""

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, LayerContext, Scorer, registered
from kvpolicy.integrations.transformers import PolicyCache, read_together
from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.integrations.transformers.stacking import may_stack, stack
from kvpolicy.policies import (
    H2O,
    AdaKV,
    FastKV,
    FullContext,
    GemFilter,
    GlobalThresholdSelector,
    GQAGroupSelector,
    KVzip,
    PassAllPropagation,
    SnapKV,
    StagedPropagation,
    StreamingLLM,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from tests.integrations.situations.models import KINDS, PLAIN, model_of
from tests.integrations.situations.policies import BOUNDS, GAPLESS, TOGETHER
from tests.integrations.support.reading import read
from tests.integrations.vision.models import FAMILIES
from tests.integrations.vision.prompts import model_inputs
from tests.integrations.vision.rows import first_parts
from tests.integrations.vision.rows import model_of as vision_model

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


def dropping(layer: int) -> CachePolicy:
    return FastKV(tsp_layer=layer, tsp_rate=0.4, retention_rate=0.25, window_size=4, kernel_size=3)


def others() -> dict[str, CachePolicy]:
    """What no method does by itself: gapless, joint choices, bounded answers."""
    joint = CachePolicy(
        WindowMaxPoolScorer(4), GlobalThresholdSelector(0.3, window_size=4), dropping(1).propagation
    )
    bounded = {name: SnapKV(0.4, decoding=rule) for name, (rule, _) in BOUNDS.items()}
    return {name: policy for name, (policy, _) in {**GAPLESS, **TOGETHER}.items()} | {
        **bounded,
        "joint behind a drop": joint,
    }


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
    model: PreTrainedModel, policy: CachePolicy, ids: Tensor, mask: Tensor | None, **inputs: Tensor
) -> tuple[PolicyCache, Tensor]:
    alone, logits = read(model, policy, ids, mask, **inputs)
    return alone, logits[:, -1]


@torch.no_grad()
def forward(model: PreTrainedModel, held: PolicyCache, ids: Tensor, mask: Tensor) -> Tensor:
    with held.attached(model):
        output: Any = model(ids, attention_mask=mask, cache=held)
    return output.logits


@attrs.define
class Pair:
    """A cache that has read together with others, and one that has read alone."""

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


Read = tuple[PolicyCache, Tensor]  # a cache that has read alone, and the prompt's last logits


def read_each(
    model: PreTrainedModel,
    policies: Mapping[str, CachePolicy],
    ids: Tensor,
    mask: Tensor,
    **inputs: Tensor,
) -> tuple[dict[str, Read], dict[str, Exception]]:
    """Reads alone under each of some policies; returns what was read, and why others cannot."""
    can, cannot = dict[str, Read](), dict[str, Exception]()
    for name, policy in policies.items():
        try:
            can[name] = read_alone(model, policy, ids, mask, **inputs)
        except ValueError as error:
            cannot[name] = error
    return can, cannot


def check_alike(
    model: PreTrainedModel,
    alone: Mapping[str, Read],
    ids: Tensor,
    mask: Tensor,
    tolerance: float = TOLERANCE,
    *,
    answers: bool = True,
    turns: bool = True,
    **inputs: Tensor,
) -> None:
    """Asserts that caches that have read together are as if alone, now and in what follows."""
    policies = {name: cache.policy for name, (cache, _) in alone.items()}
    caches = read_together(model, ids, policies, mask, **inputs)
    assert list(caches) == list(caches.logits) == list(policies)
    for name, (cache, logits) in alone.items():
        pair = Pair(model, caches[name], cache, mask, tolerance)
        pair.check_held()
        pair.check_close(caches.logits[name], logits)
        if answers:
            pair.answer(logits.argmax(dim=-1, keepdim=True))
        if turns:
            pair.second_turn()


@pytest.mark.parametrize("rows", [1, 2])
def test_other_policies_are_as_if_alone(rows: int) -> None:
    model, (ids, mask) = model_of("llama"), prompt(rows)
    can, cannot = read_each(model, others(), ids, mask)
    assert not cannot
    check_alike(model, can, ids, mask)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", [*PLAIN, *KINDS])
def test_methods_on_models_of_every_kind(name: str, rows: int) -> None:
    model = model_of(name)
    ids, mask = prompt(rows)
    policies = all_methods() if name in PLAIN else methods(rows - 1)
    can, cannot = read_each(model, policies, ids, mask)
    assert can
    check_alike(model, can, ids, mask, turns=rows == 1 or name in PLAIN)
    beside = {"full": FullContext(), "streaming": StreamingLLM(0.2)}
    for refused, error in cannot.items():
        with pytest.raises(type(error)) as raised:
            read_together(model, ids, {**beside, refused: policies[refused]}, mask)
        assert str(raised.value) == f"policy {refused!r}: {error}"
    assert not hooks_of(model)


FASTKV = dropping(1)
SOME: dict[str, CachePolicy] = {
    "full": FullContext(),
    "snapkv": SnapKV(0.3, window_size=4),
    "adakv": AdaKV(0.3, window_size=4),
    "fastkv": FASTKV,
    "gemfilter": GemFilter(retention_rate=0.4),
}


@pytest.mark.parametrize("rows", [(0,), (1, 0)])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3", "qwen3_vl"])
def test_images(name: str, rows: tuple[int, ...]) -> None:
    inputs = model_inputs(FAMILIES[name], [[first_parts(name)[row]] for row in rows])
    model, ids, mask = vision_model(name), inputs.pop("input_ids"), inputs.pop("attention_mask")
    policies = {**SOME, "fastkv": dropping(FAMILIES[name].drops_after)}
    can, _ = read_each(model, policies, ids, mask, **inputs)
    assert {"full", "snapkv", "adakv", "fastkv"} <= can.keys()
    # In a loop by hand, Qwen's models make positions of too many tokens, with any cache.
    answers = not name.startswith("qwen")
    check_alike(model, can, ids, mask, answers=answers, turns=False, **inputs)


def test_embeddings_in_place_of_ids() -> None:
    model, (ids, mask) = model_of("llama"), prompt(2)
    caches = read_together(model, None, SOME, mask, inputs_embeds=model.get_input_embeddings()(ids))
    for name, policy in SOME.items():
        Pair(model, caches[name], read_alone(model, policy, ids, mask)[0], mask).check_held()


@contextmanager
def tokens_read(model: PreTrainedModel) -> Iterator[list[int]]:
    """Counts the tokens that each layer reads, as many as its MLP gets."""
    counts = [0] * len(model.model.layers)

    def counted(index: int) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Tensor]) -> None:
            counts[index] += args[0].shape[1]

        return hook

    handles = [
        layer.mlp.register_forward_pre_hook(counted(index))
        for index, layer in enumerate(model.model.layers)
    ]
    yield counts
    for handle in handles:
        handle.remove()


def cost(policies: Mapping[str, CachePolicy]) -> list[int]:
    model, (ids, mask) = model_of("llama"), prompt(1)
    with tokens_read(model) as counts:
        read_together(model, ids, policies, mask)
    return counts


def test_policies_that_only_evict_cost_one_reading() -> None:
    length = LENGTHS[0]
    evicting = {
        name: policy
        for name, policy in (all_methods() | others()).items()
        if not policy.propagation.acting_layers(4) and policy.rereading is None
    }
    assert len(evicting) > 40
    assert cost(evicting) == [length, length, length, 1]  # the last layer, for the last logits


def test_policies_that_drop_share_the_layers_up_to_their_drop() -> None:
    length = LENGTHS[0]
    drop = functools.partial(TokenSelectivePropagation, window_size=4)
    stages = StagedPropagation([drop(tsp_layer=1, tsp_rate=0.7), drop(tsp_layer=2, tsp_rate=0.3)])
    two = CachePolicy(WindowMaxPoolScorer(4), GQAGroupSelector(0.2, window_size=4), stages)
    few = int(0.4 * length)
    drops = {"early": FASTKV, "late": dropping(2)}
    shared = [length, length, length + few]
    assert cost({"full": FullContext(), **drops}) == [*shared, 3]
    assert cost(drops) == [*shared, 2]  # no policy needs the last layer of all tokens
    own = cost({"two": two})
    assert own[0] == length > own[1] > own[2] > own[3]
    both = [length, length, length + own[2], 2]
    assert cost({"full": FullContext(), "two": two}) == both


def test_other_policies_read_alone() -> None:
    alone = {"gemfilter": GemFilter(retention_rate=0.4), "kvzip": KVzip(0.4, chunk_size=19)}
    own = [cost({name: policy}) for name, policy in alone.items()]
    shared = cost({"full": FullContext(), "snapkv": SnapKV(0.2)})
    together = cost({"full": FullContext(), "snapkv": SnapKV(0.2), **alone})
    assert together == [sum(counts) for counts in zip(shared, *own, strict=True)]


def test_full_keys_are_freed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_out: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    update = PassRun.update

    def noted(run: PassRun, *args: Any) -> tuple[Tensor, Tensor]:
        alive.append(sum(each() is not None for each in handed_out))
        keys, values = update(run, *args)
        handed_out.extend((weakref.ref(keys), weakref.ref(values)))
        return keys, values

    monkeypatch.setattr(PassRun, "update", noted)
    read_together(model_of("llama"), prompt(1)[0], [H2O(0.2), SnapKV(0.2), StreamingLLM(0.2)])
    assert alive[:4] == [0, 0, 0, 0]  # and then the last layer again, for the last logits


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["snapkv", "adakv", "fastkv", "gemfilter"])
def test_generate_goes_on(name: str, rows: int) -> None:
    model, (ids, mask) = model_of("llama"), prompt(rows)
    caches = read_together(model, ids, SOME, mask)
    alone, logits = read_alone(model, SOME[name], ids, mask)
    first = logits.argmax(dim=-1, keepdim=True)
    more = torch.cat([ids, first, prompt(rows, SECOND, seed=9)[0]], dim=1)
    wide = torch.cat([mask, torch.ones_like(more[:, ids.shape[1] :])], dim=1)
    said, want = (
        model.generate(
            more, attention_mask=wide, cache=each, max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        for each in (caches[name], alone)
    )
    assert torch.equal(said, want)
    wide = torch.cat([wide, torch.ones_like(said[:, wide.shape[1] : -1])], dim=1)
    Pair(model, caches[name], alone, wide).check_held()


def test_appended_tokens_are_taken_back() -> None:
    model, (ids, mask) = model_of("llama"), prompt(2)
    caches = read_together(model, ids, SOME, mask)
    for name, policy in SOME.items():
        pair = Pair(model, caches[name], read_alone(model, policy, ids, mask)[0], mask)
        pair.step(prompt(2, 3)[0])
        for each in (pair.together, pair.alone):
            each.crop(-2)
            with pytest.raises(ValueError, match="only 1 tokens were"):
                each.crop(-2)
        pair.mask = pair.mask[:, :-2]
        pair.answer(prompt(2, 1, seed=4)[0])


def test_equal_policies_have_caches_of_their_own() -> None:
    model, (ids, mask) = model_of("llama"), prompt(1)
    equal = {name: policy for each in "ab" for name, policy in ((f"{each} full", FullContext()),)}
    equal |= {"a": SnapKV(0.3), "b": SnapKV(0.3), "a drops": FASTKV, "b drops": FASTKV}
    caches = read_together(model, ids, equal, mask)
    for name, policy in equal.items():
        alone, logits = read_alone(model, policy, ids, mask)
        pair = Pair(model, caches[name], alone, mask)
        pair.check_held()  # whatever the others have read meanwhile
        pair.check_close(caches.logits[name], logits)
        pair.answer(prompt(1, 1, seed=len(name))[0], count=9)
    ends = {tuple(cache.layers[0].keys[0, 0, -1].tolist()) for cache in caches.values()}
    assert len(ends) > 1


# Errors.


@attrs.frozen
class Fails(Scorer):
    """Fails at one layer."""

    layer: int = 2

    def score(self, context: LayerContext) -> Tensor:
        if context.layer_idx == self.layer:
            raise ValueError("no score today")
        return context.keys.norm(dim=-1)


@attrs.frozen
class NotANumber(Scorer):
    """Gives a saliency that is found to be wrong after all layers have run."""

    def score(self, context: LayerContext) -> Tensor:
        return context.keys.norm(dim=-1) * (float("nan") if context.layer_idx == 1 else 1.0)


def scored(scorer: Scorer) -> CachePolicy:
    return CachePolicy(scorer, GQAGroupSelector(0.3), PassAllPropagation())


def hooks_of(model: PreTrainedModel) -> int:
    return sum(
        len(hooks)
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
    )


BROKEN: dict[str, tuple[CachePolicy, str]] = {
    "scorer": (scored(Fails()), "no score today"),
    "late": (scored(NotANumber()), "must return numbers"),
    "layer": (FastKV(tsp_layer=9), "tsp_layer"),
    "behind": (CachePolicy(Fails(), GQAGroupSelector(0.3), FASTKV.propagation), "no score today"),
    "restarts": (GemFilter(filter_layer=9), "filter_layer"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_names_its_policy_and_leaves_the_model_usable(name: str) -> None:
    model, (ids, mask) = model_of("llama"), prompt(1)
    policy, message = BROKEN[name]
    with pytest.raises(ValueError, match=f"^policy 'broken': .*{message}"):
        read_together(model, ids, {**SOME, "broken": policy}, mask)
    assert hooks_of(model) == 0
    check_alike(model, read_each(model, SOME, ids, mask)[0], ids, mask)
    assert hooks_of(model) == 0


def test_what_a_forward_may_not_have_names_the_policy() -> None:
    model, (ids, mask) = model_of("llama"), prompt(1)
    places = torch.arange(7, 7 + ids.shape[1])[None]
    gapless = StreamingLLM(0.3, gapless=True)
    with pytest.raises(ValueError, match="^policy 'gapless': position_ids must"):
        read_together(model, ids, {**SOME, "gapless": gapless}, mask, position_ids=places)


def test_numbers_that_are_none_in_the_last_layer() -> None:
    model, (ids, mask) = copy.deepcopy(model_of("llama")), prompt(1)
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="^policy 'snapkv': score of .* must return numbers"):
        read_together(model, ids, {"full": FullContext(), "snapkv": SnapKV(0.3)}, mask)


def test_a_failing_model_is_left_usable() -> None:
    model, (ids, mask) = model_of("llama"), prompt(1)

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory left")

    handle = model.model.layers[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="^no memory left$"):
        read_together(model, ids, SOME, mask)
    handle.remove()
    assert hooks_of(model) == 0
    check_alike(model, read_each(model, SOME, ids, mask)[0], ids, mask)


def test_names() -> None:
    model, (ids, _) = model_of("llama"), prompt(1)
    listed = [SnapKV(0.2), H2O(0.2)]
    assert list(read_together(model, ids, listed)) == [str(each) for each in listed]
    with pytest.raises(ValueError, match=r"different names, but SnapKV\(.*give a mapping"):
        read_together(model, ids, [SnapKV(0.2), H2O(0.2), SnapKV(0.2)])


@pytest.mark.parametrize(
    ("policies", "error", "message"),
    [
        ({}, ValueError, "at least one policy"),
        ([], ValueError, "at least one policy"),
        (SnapKV(), TypeError, "a mapping of names to policies or a sequence"),
        ("snapkv", TypeError, "a mapping of names to policies or a sequence"),
        ({"one": "snapkv"}, TypeError, "^policy 'one': policy must be a CachePolicy"),
    ],
)
def test_what_is_no_policies(policies: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_together(model_of("llama"), prompt(1)[0], policies)


def test_arguments_that_are_not_the_callers() -> None:
    model, (ids, mask) = model_of("llama"), prompt(2)
    with pytest.raises(ValueError, match="must not have labels, use_cache"):
        read_together(model, ids, SOME, mask, labels=ids, use_cache=True)
    with pytest.raises(ValueError, match="padding on the left only"):
        read_together(model, ids, SOME, mask.flip(1))


def test_no_gradient_is_recorded() -> None:
    caches = read_together(model_of("llama"), prompt(1)[0], SOME)
    assert not any(logits.requires_grad for logits in caches.logits.values())
    assert not any(layer.keys.requires_grad for each in caches.values() for layer in each.layers)


# Whose layers hold keys and values of their own, and nothing else.
STACKED = sorted({"gpt_oss", "gemma3_text", "llama4_text_mixed", "gpt2", "bert", "gptj"} & {*KINDS})


@torch.no_grad()
@pytest.mark.parametrize("name", [*PLAIN, *STACKED])
def test_rows_of_stacked_caches_answer_as_if_alone(name: str) -> None:
    """Several tokens at once, then one at a time; with other lengths in heads, layers and rows."""
    model, (ids, mask) = model_of(name), prompt(1)
    can, _ = read_each(model, all_methods() | others(), ids, mask)
    alone = {each: cache for each, (cache, _) in can.items() if may_stack(cache)}
    stacked = stack([copy.copy(cache) for cache in alone.values()])
    assert stacked.seen_lengths == LENGTHS[:1] * len(alone)
    following, _ = prompt(1, SECOND, seed=8)
    for _ in range(3):
        many = mask.new_ones(len(alone), stacked.get_seq_length() + following.shape[1])
        got = forward(model, stacked, following.expand(len(alone), -1), many)
        wanted = [forward(model, it, following, many[:1]) for it in alone.values()]
        for row, want in zip(got, wanted, strict=True):
            Pair(model, stacked, stacked, mask).check_close(row[None], want)
        following = got[:1, -1:].argmax(-1)


def test_equal_scorers_are_asked_once_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not where a policy reads fewer tokens than another."""
    asked: list[int] = []
    real = WindowMaxPoolScorer.score

    def counted(scorer: WindowMaxPoolScorer, context: LayerContext) -> Tensor:
        asked.append(context.layer_idx)
        return real(scorer, context)

    model, (ids, mask) = model_of("llama"), prompt(2)
    own = {name: SnapKV(rate, window_size=4) for name, rate in (("a", 0.2), ("b", 0.4))}
    other = dropping(1)
    alone, _ = read_each(model, {**own, "drops": other}, ids, mask)
    monkeypatch.setattr(WindowMaxPoolScorer, "score", counted)
    read_together(model, ids, own, mask)
    assert asked == [0, 1, 2, 3]
    asked.clear()
    read_together(model, ids, {"c": attrs.evolve(own["a"], kernel_size=3), "drops": other}, mask)
    assert asked == [0, 1, 2, 2, 3, 3]
    monkeypatch.undo()
    check_alike(model, alone, ids, mask)
