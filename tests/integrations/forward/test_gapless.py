"""What is kept stands without gaps: against keys that are held unturned and turned by place."""

import copy
from functools import cache
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, LayerContext
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    AdaptiveHeadSelector,
    CriticalSelector,
    FirstLayersWholeSelector,
    GQAGroupSelector,
    KeepAllSelector,
    KVzip,
    PassAllPropagation,
    PyramidSelector,
    RestartPropagation,
    SnapKV,
    StreamingLLM,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from tests import reference
from tests.families import Family
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.support.asking import TurnedBackScorer
from tests.integrations.support.conversation import (
    TOLERANCE,
    expected_turns,
    prompt,
    run_conversation,
)
from tests.reference import GaplessState, ReferenceState, tiny_model

SNAPKV = CachePolicy(
    WindowMaxPoolScorer(4, kernel_size=3),
    GQAGroupSelector(0.3, window_size=4),
    PassAllPropagation(),
    gapless=True,
)
STREAMING = StreamingLLM(retention_tokens=14, num_sinks=2, gapless=True)
METHODS: dict[str, tuple[CachePolicy, reference.Method]] = {
    "streamingllm": (StreamingLLM(0.3, gapless=True), reference.StreamingLLM(0.3)),
    "streaming_llm_tokens": (STREAMING, reference.StreamingLLM(retention_tokens=14, num_sinks=2)),
    "snapkv": (SNAPKV, reference.SnapKV(0.3, window_size=4, kernel_size=3)),
    "keep_all": (
        CachePolicy(None, KeepAllSelector(), PassAllPropagation(), gapless=True),
        reference.FullContext(),
    ),
}


@cache
def llama() -> PreTrainedModel:
    return tiny_model("llama", seed=3)


@pytest.mark.parametrize("name", ["streamingllm", "snapkv"])
def test_positions_matter(name: str) -> None:
    """The tests above could not pass where keys keep their positions."""
    policy, method = METHODS[name]
    _, turns = run_conversation(llama(), policy, (0,))
    kept = expected_turns(llama(), method, 0, state_class=ReferenceState)
    assert turns[0].kept[0] == kept[0].kept  # what is kept of a first prompt is the same
    decoded = turns[0].logits[0, 1:] - kept[0].decode_logits
    assert decoded.abs().max() > 100 * TOLERANCE


# A loop by hand, and what is done with caches.


@torch.no_grad()
def decode(model: PreTrainedModel, store: PolicyCache, ids: Tensor, steps: int) -> Tensor:
    """Logits ``[batch, 1 + steps, vocab]`` of a loop by hand that gives no position_ids."""
    found = []
    with store.attached(model):
        for _ in range(1 + steps):
            output = model(ids, cache=store)
            found.append(output.logits[:, -1])
            ids = found[-1].argmax(-1, keepdim=True)
    return torch.stack(found, dim=1)


@torch.no_grad()
def test_short_turns_never_leave_what_was_trained() -> None:
    """200 tokens in turns of 30: rotary positions stay below what is kept, a turn and an answer."""
    model, kept, turn, answer = llama(), 24, 30, 10
    read: list[int] = []
    hook = model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(
            int((args[1] if len(args) > 1 else kwargs["position_ids"]).max())
        ),
        with_kwargs=True,
    )
    store = PolicyCache(StreamingLLM(retention_tokens=kept, gapless=True))
    state = GaplessState(model, reference.StreamingLLM(retention_tokens=kept))
    try:
        for index in range(5):
            ids = prompt(turn, seed=index)
            store.start_turn()
            found = decode(model, store, ids, answer)[0]
            expected = state.turn(ids[0].tolist(), answer)
            want = torch.cat([expected.prefill_logits[None], expected.decode_logits])
            torch.testing.assert_close(found, want, atol=TOLERANCE, rtol=0)
    finally:
        hook.remove()
    assert store.get_seq_length() == 200
    assert state.farthest == max(read) == kept + answer + turn - 1 < 64
    positions = store.layers[0].positions[0, 0].tolist()
    assert positions == [*range(4), *range(170, 200)]  # original ones


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
OTHERS: dict[str, Any] = {
    "yarn": lambda: Family("llama", {"rope_parameters": YARN}).build(seed=1),
    "part of the channels": lambda: builds()["stablelm_partial"].model(),
    "neighbours": lambda: builds()["glm"].model(),
    "layers without": lambda: builds()["smollm3"].model(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_keys_are_those_of_what_is_kept_read_alone(name: str) -> None:
    """In the first layer, where a key knows of no other token; values and positions stay."""
    model, ids = OTHERS[name](), prompt(30) % 60
    keeping = CachePolicy(None, KeepAllSelector(), PassAllPropagation())
    gapless, alone, apart = (
        PolicyCache(each)
        for each in (
            StreamingLLM(retention_tokens=10, num_sinks=3, gapless=True),
            keeping,
            StreamingLLM(retention_tokens=10, num_sinks=3),
        )
    )
    decode(model, gapless, ids, 0)
    decode(model, alone, torch.cat([ids[:, :3], ids[:, 23:]], dim=1), 0)
    decode(model, apart, ids, 0)
    torch.testing.assert_close(gapless.layers[0].keys, alone.layers[0].keys, atol=1e-4, rtol=1e-4)
    turned = [
        not torch.allclose(one.keys, other.keys)
        for one, other in zip(gapless.layers, apart.layers, strict=True)
    ]
    rotary = [bool(each) for each in getattr(model.config, "no_rope_layers", None) or [True] * 4]
    assert turned == rotary
    assert all(rotary) == (name != "layers without")
    for one, other in zip(gapless.layers, apart.layers, strict=True):
        assert torch.equal(one.values, other.values)
        assert torch.equal(one.positions, other.positions)


@torch.no_grad()
def test_in_half_precision_turning_again_and_again_stays_near() -> None:
    """Sinks stay where they are; what moves is turned from where it is held."""
    model = llama()
    exact, rounded = PolicyCache(STREAMING), PolicyCache(STREAMING)
    half = copy.deepcopy(model).to(torch.bfloat16)
    for index in range(6):
        for store, each in ((exact, model), (rounded, half)):
            store.start_turn()
            with store.attached(each):
                each(prompt(5, seed=index), cache=store)
    want, found = exact.layers[0].keys, rounded.layers[0].keys
    assert found.dtype == torch.bfloat16
    assert (found.float() - want).abs().max() < 0.03 * want.abs().max()


# What is refused.


@pytest.mark.parametrize(
    ("match", "parts"),
    [
        ("different numbers of tokens.*AdaptiveHeadSelector", {"selector": AdaptiveHeadSelector()}),
        ("different numbers of tokens.*PyramidSelector", {"selector": PyramidSelector()}),
        (
            "different numbers of tokens.*FirstLayersWholeSelector",
            {"selector": FirstLayersWholeSelector()},
        ),
        (
            "different numbers of tokens.*CriticalSelector",
            {"selector": CriticalSelector(AdaptiveHeadSelector())},
        ),
        ("restarts the prefill", {"propagation": RestartPropagation(window_size=8)}),
        ("decoding must be None if gapless", {"decoding": SnapKV(decoding=64).decoding}),
        ("rereading must be None if gapless", {"rereading": KVzip().rereading}),
    ],
)
def test_parts_that_do_not_fit(match: str, parts: dict[str, Any]) -> None:
    own = {
        "scorer": WindowMaxPoolScorer(),
        "selector": GQAGroupSelector(),
        "propagation": PassAllPropagation(),
    }
    CachePolicy(**(own | parts))
    with pytest.raises(ValueError, match=match):
        CachePolicy(**(own | parts), gapless=True)


def test_declarations_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="decoding must be None if gapless"):
        StreamingLLM(decoding=64, gapless=True)
    with pytest.raises(TypeError, match="gapless must be a bool, got 1"):
        StreamingLLM(gapless=1)
    FirstLayersWholeSelector(whole_layers=0)
    for fits in (FirstLayersWholeSelector(whole_layers=0), CriticalSelector()):
        CachePolicy(WindowMaxPoolScorer(), fits, PassAllPropagation(), gapless=True)
    dropping = CachePolicy(
        WindowMaxPoolScorer(),
        GQAGroupSelector(),
        TokenSelectivePropagation(tsp_layer=1, tsp_rate=0.5),
        gapless=True,
    )
    with pytest.raises(ValueError, match=r"gapless must be False if tokens are dropped.*\[1\]"):
        dropping.check_model(4)


def test_frequencies_that_change_with_the_length() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = Family("llama", {"rope_parameters": dynamic}).build(seed=1)
    with pytest.raises(UnsupportedModelError, match="change with the length of what is read"):
        decode(model, PolicyCache(STREAMING), prompt(40), 0)


@attrs.frozen
class Unlike(GQAGroupSelector):
    """Declares what it does not do, in the later layers."""

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        return super().select(saliency, context)[:, :, int(context.layer_idx > 1) :]


def test_counts_that_differ_are_found() -> None:
    model = llama()
    policy = CachePolicy(WindowMaxPoolScorer(), Unlike(0.5), PassAllPropagation(), gapless=True)
    store = PolicyCache(policy)
    message = "select of Unlike.* must keep equally many tokens .* got 19 to 20 in row 0"
    with pytest.raises(ValueError, match=message):
        decode(model, store, prompt(40), 0)
    assert store.get_seq_length() == 0
    assert store.layers[0].kept_len == 0


@torch.no_grad()
def test_positions_of_others() -> None:
    """Positions that a caller gives must be each row's own, in a prompt and behind it."""
    model, store = llama(), PolicyCache(STREAMING)
    at = torch.arange(60)[None]
    message = "position_ids must count each row's own tokens from 0 if StreamingLLM.*gapless.*"
    with store.attached(model):
        with pytest.raises(ValueError, match=message + "0 for a token of row 0, got 7"):
            model(prompt(40), cache=store, position_ids=at[:, 7:47])
        model(prompt(40), cache=store, position_ids=at[:, :40])
        for wrong in (39, 41):
            with pytest.raises(ValueError, match=f"{message}40 for a token of row 0, got {wrong}"):
                model(prompt(1), cache=store, position_ids=at[:, wrong : wrong + 1])
        fork = copy.deepcopy(store)
        given = model(prompt(1), cache=store, position_ids=at[:, 40:41]).logits
    assert torch.equal(given[:, -1], decode(model, fork, prompt(1), 0)[:, 0])


def test_parts_that_turn_keys_themselves() -> None:
    """They are shown original positions, at which nothing stands any more in a second turn."""
    policy = CachePolicy(
        TurnedBackScorer(), GQAGroupSelector(0.5), PassAllPropagation(), gapless=True
    )
    model, store = llama(), PolicyCache(policy)
    decode(model, store, prompt(40), 2)
    before = store.layers[0].keys
    store.start_turn()
    with pytest.raises(UnsupportedModelError, match="to positions without gaps; use a policy"):
        decode(model, store, prompt(10), 0)
    assert torch.equal(store.layers[0].keys, before)
