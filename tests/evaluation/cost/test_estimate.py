"""Costs before running: counted on paper, by torch, by the cache, and as the paper has them."""

import io
import json
from typing import Any

import attrs
import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kvpolicy import CachePolicy, KVSelector, LayerContext, build
from kvpolicy.evaluation import ModelShape, estimate, load_shape, shape_of
from kvpolicy.evaluation.commands.work.estimate import estimate_table, notes_of
from kvpolicy.evaluation.comparison.variant import Variant
from kvpolicy.evaluation.cost.model_shape import LayerShape, attention_layer
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.policies import (
    H2O,
    AdaKV,
    FastKV,
    FullContext,
    GemFilter,
    GQAGroupSelector,
    PyramidInfer,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from tests.families import FAMILIES
from tests.integrations.support.content import MassPropagation
from tests.reference import random_tokens, tiny_model

LLAMA, MINISTRAL, NEMO = "llama-3.1-8b", "ministral-8b", "mistral-nemo-12b"

# A token: queries 8 x 12, keys 8 x 6, values 8 x 6, output 12 x 8, three matrices of 8 x 10.
LAYER = attention_layer(8, 4, 2, 3, mlp=240)
TINY = ModelShape("tiny", hidden_size=8, layers=(LAYER, LAYER), vocab_size=7)


def windowed(*windows: int | None) -> ModelShape:
    """Layers with these windows."""
    return attrs.evolve(TINY, layers=tuple(attrs.evolve(LAYER, window=each) for each in windows))


def gem_filter(filter_layer: int | None = None, retention_rate: float = 0.1) -> CachePolicy:
    policy = build("gemfilter", filter_layer=filter_layer, retention_rate=retention_rate)
    assert isinstance(policy, CachePolicy)
    return policy


def test_full_context_on_paper() -> None:
    found = estimate(FullContext(), TINY, 40)
    assert found.full == found.prefill
    assert found.full.linear == 2 * 2 * 40 * (96 + 48 + 48 + 96 + 240)
    assert found.full.attention == 2 * (2 * 40 * 40 * 12)  # half of two products of 40 x 40 x 12
    assert found.full.head == 2 * 8 * 7
    assert found.full.total == 84480 + 76800 + 112
    assert (found.speedup, found.compute_rate, found.kv_share) == (1.0, 1.0, 1.0)
    assert found.kv_bytes == found.full_kv_bytes == 2 * 40 * (2 * 2 * 3 * 2)


def test_what_content_decides_is_not_known() -> None:
    part = MassPropagation((0,))
    policy = CachePolicy(WindowMaxPoolScorer(4), GQAGroupSelector(0.5, window_size=4), part)
    found = estimate(policy, TINY, 40)
    assert found.compute_rate is None
    assert found.prefill == found.full  # the most
    assert found.kept_tokens == (20.0, 20.0)
    data = found.as_data()
    names = ("prefill_compute_rate", "prefill_flops", "prefill_speedup_allowed")
    assert [data[name] for name in names] == [None] * 3
    json.dumps(data)
    variant = Variant("mass", policy)
    shown = io.StringIO()
    Console(width=80, file=shown).print(estimate_table([variant], [found]))
    cells = shown.getvalue().splitlines()[2].split()
    assert cells[:6] == ["mass", "-", "-", "-", "-", "20"]
    (note,) = (note for note in notes_of(TINY, 40, [variant]) if "content" in note)
    assert note.startswith("mass decides by the prompt's content how many tokens go on")


def test_a_drop_on_paper() -> None:
    policy = FastKV(tsp_layer=0, tsp_rate=0.5, retention_rate=0.25)
    found = estimate(policy, TINY, 40, dtype=torch.float32)
    assert found.prefill.linear == 2 * (40 + 20) * 528
    assert found.prefill.attention == 2 * (40**2 + 20**2) * 12
    assert found.speedup == pytest.approx((84480 + 76800 + 112) / (63360 + 48000 + 112))
    assert found.compute_rate == 0.75
    assert found.kept_tokens == (10.0, 10.0)
    assert (found.kv_bytes, found.full_kv_bytes, found.kv_share) == (960, 3840, 0.25)


def test_a_restart_on_paper() -> None:
    """Layer 0 whole, of layer 1 queries, keys and values; then both layers over 10 tokens."""
    found = estimate(gem_filter(1, 0.25), TINY, 40)
    assert found.prefill.linear == 2 * 40 * 528 + 2 * 40 * 192 + 2 * 2 * 10 * 528
    assert found.prefill.attention == 2 * 12 * (40**2 + 2 * 10**2)
    assert found.prefill.head == 2 * 8 * 7  # once
    assert found.compute_rate == 0.75
    assert found.kept_tokens == (10.0, 10.0)


def test_layers_that_differ_are_counted_each() -> None:
    layers = (attention_layer(8, 4, 2, 3, mlp=1000), attention_layer(8, 4, 2, 3, mlp=1))
    shape = attrs.evolve(TINY, layers=layers)
    found = estimate(FastKV(tsp_layer=0, tsp_rate=0.5, retention_rate=0.25), shape, 40)
    assert found.prefill.linear == 2 * 40 * (288 + 1000) + 2 * 20 * (288 + 1)


def test_a_window_on_paper() -> None:
    """Of 5 tokens the first sees 1, the others 2: themselves and the one before."""
    shape = windowed(2, None)
    found = estimate(SnapKV(retention_rate=1.0), shape, 40)
    # The triangle of 40 without that of 38, a product of 12 numbers twice, 2 operations each.
    assert found.prefill.attention == pytest.approx(4 * 12 * (40**2 - 38**2 + 40**2) / 2)
    assert found.kept_tokens == (1.0, 40.0)
    within = windowed(40, None)
    assert estimate(SnapKV(), within, 40) == estimate(SnapKV(), TINY, 40)


def test_chunks_on_paper() -> None:
    """Of 40 tokens two chunks of 16, and 8: each token sees its own chunk's before it."""
    chunk = attrs.evolve(LAYER, window=16, chunked=True)
    found = estimate(FullContext(), attrs.evolve(TINY, layers=(chunk, LAYER)), 40)
    assert found.full.attention == pytest.approx(2 * 24 * (16**2 + 16**2 + 8**2 + 40**2) / 2)


@pytest.mark.parametrize(("length", "kept"), [(16, 16), (17, 1), (40, 8), (47, 15), (48, 0)])
def test_chunks_hold_what_the_next_token_sees(length: int, kept: int) -> None:
    """Chunks of 16: token 40 sees tokens 32 to 39, and token 48 begins a chunk."""
    chunk = attrs.evolve(LAYER, window=16, chunked=True)
    shape = attrs.evolve(TINY, layers=(chunk, LAYER))
    assert estimate(FullContext(), shape, length).kept_tokens == (kept, length)
    # Half of the tokens reach it, spread evenly: so does half of what the next one sees.
    shape = attrs.evolve(TINY, layers=(LAYER, chunk))
    half = FastKV(tsp_layer=0, tsp_rate=0.5, retention_rate=0.5, window_size=1)
    assert estimate(half, shape, length).kept_tokens == (length / 2, kept / 2)


def test_places_beside_index_keys_on_paper() -> None:
    """Three ids of 8 bytes for each token, whatever the precision of the rest."""
    shape = attrs.evolve(TINY, layers=(attrs.evolve(LAYER, place_bytes=24),))
    for dtype in (torch.bfloat16, torch.float32):
        found = estimate(FullContext(), shape, 10, dtype=dtype)
        assert found.full_kv_bytes == 10 * (LAYER.token_elements * dtype.itemsize + 24)


def test_a_state_on_paper() -> None:
    """A layer of 50 weights whose state has 30 numbers, 20 of them always in float32."""
    recurrent = LayerShape(weights=50, state_elements=30, float_state_elements=20)
    shape = attrs.evolve(TINY, layers=(LAYER, recurrent))
    policy = FastKV(tsp_layer=0, tsp_rate=0.5, retention_rate=0.25)
    found = estimate(policy, shape, 40)
    assert found.prefill.linear == 2 * 40 * 528 + 2 * 20 * 50
    assert (found.prefill.states, found.full.states) == (4 * 20 * 30, 4 * 40 * 30)
    assert found.state_bytes == 10 * 2 + 20 * 4
    assert found.kv_bytes == 10 * 12 * 2 + found.state_bytes
    assert found.full_kv_bytes == 40 * 12 * 2 + found.state_bytes
    assert (found.kept_tokens, found.mean_kept) == ((10.0, 0.0), 10.0)


def test_a_layer_with_anothers_keys_on_paper() -> None:
    """It attends, and holds nothing."""
    borrowing = attrs.evolve(LAYER, token_elements=0)
    found = estimate(SnapKV(0.25), attrs.evolve(TINY, layers=(LAYER, borrowing)), 40)
    assert found.full.attention == 2 * (2 * 40 * 40 * 12)
    assert found.kv_bytes == 10 * 12 * 2


def test_tokens_that_went_on_see_fewer_in_a_window() -> None:
    """Half of the tokens, spread evenly, see half of the window: a quarter of the pairs."""
    shape = windowed(None, 10)
    whole = estimate(FullContext(), shape, 40)
    found = estimate(FastKV(tsp_layer=0, tsp_rate=0.5, retention_rate=0.5), shape, 40)
    first = 2 * 40**2 * 12
    assert found.prefill.attention - first == pytest.approx((whole.full.attention - first) / 4)
    assert found.kept_tokens == (20.0, 0.5 * 9)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3"])
def test_the_cache_keeps_as_many_tokens_in_windows(family: str) -> None:
    model = FAMILIES[family].build(seed=4)
    cache = PolicyCache(SnapKV(0.25))
    with torch.no_grad(), cache.attached(model):
        model(torch.tensor([random_tokens(6, 200)]), cache=cache)
    held = cache.report()
    shape = shape_of(model.config)
    assert len({layer.window for layer in shape.layers}) == 2
    found = estimate(SnapKV(0.25), shape, 200, dtype=torch.float32)
    assert found.kept_tokens == pytest.approx([layer.kept for layer in held.layers])
    assert found.kv_bytes == held.total.held_bytes
    assert found.full_kv_bytes == held.total.full_bytes


@attrs.frozen
class Falling(KVSelector):
    """Keeps less the later the layer."""

    @property
    def needs_saliency(self) -> bool:
        return False

    def kept_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        return [1.0, 0.5, 0.3, 0.1][:num_layers]

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        raise NotImplementedError


def test_a_layer_keeps_no_more_than_reaches_it() -> None:
    policy = CachePolicy(
        SnapKV().scorer, Falling(), TokenSelectivePropagation(tsp_layer=1, tsp_rate=0.2)
    )
    shape = attrs.evolve(TINY, layers=(LAYER,) * 4)
    assert estimate(policy, shape, 100).kept_tokens == pytest.approx((100, 50, 20, 10))


def test_a_short_prompt_keeps_its_window() -> None:
    found = estimate(FastKV(tsp_layer=0, tsp_rate=0.3, retention_rate=0.1), TINY, 20)
    assert found.kept_tokens == (8.0, 8.0)
    assert found.prefill.linear == 2 * (20 + 8) * 528
    assert estimate(SnapKV(), TINY, 3).kept_tokens == (3.0, 3.0)
    assert estimate(StreamingLLM(), TINY, 1).kept_tokens == (1.0, 1.0)


def test_first_tokens_that_always_go_on_are_computed() -> None:
    policy = FastKV(tsp_layer=0, tsp_rate=0.1, retention_rate=0.1, protect=22)
    found = estimate(policy, TINY, 40)
    assert found.kept_tokens == (30.0, 30.0)
    assert found.prefill.linear == 2 * (40 + 30) * 528
    assert found.compute_rate == (40 + 30) / 80
    assert policy.prefill_compute_rate(2) == 0.55  # of a long prompt
    restart = GemFilter(filter_layer=1, retention_rate=0.1, protect=19)
    assert estimate(restart, TINY, 40).compute_rate == (40 + 2 * 20) / 80


@pytest.mark.parametrize(
    ("preset", "policy", "percent"),
    [
        (LLAMA, FastKV(), 60),
        (MINISTRAL, FastKV(), 60),
        (NEMO, FastKV(), 60),
        (LLAMA, PyramidInfer(decay_ratio=0.7), 60),
        (MINISTRAL, PyramidInfer(decay_ratio=0.75), 60),
        (LLAMA, gem_filter(13, 0.1), 51),
        (LLAMA, gem_filter(13, 0.2), 61),
        (LLAMA, SnapKV(), 100),
    ],
)
def test_compute_rates_of_the_paper(preset: str, policy: CachePolicy, percent: int) -> None:
    assert round(100 * estimate(policy, load_shape(preset), 32768).compute_rate) == percent


@pytest.mark.parametrize(("thousands", "allowed"), [(8, 1.70), (32, 1.76), (128, 1.84)])
def test_speedups_of_the_paper(thousands: int, allowed: float) -> None:
    for rate in (0.1, 0.2):
        found = estimate(FastKV(retention_rate=rate), load_shape(LLAMA), 1024 * thousands)
        assert round(found.speedup, 2) == allowed
        assert found.kv_share == pytest.approx(rate)


def test_pyramid_keeps_what_reaches_each_layer() -> None:
    """Its retention is its compute rate, in the paper 60/60."""
    found = estimate(PyramidInfer(), load_shape(LLAMA), 32768)
    assert found.kv_share == pytest.approx(found.compute_rate)


@pytest.mark.parametrize(
    "policy",
    [FullContext(), SnapKV(0.2), FastKV(tsp_layer=1, tsp_rate=0.4), gem_filter(2, 0.2)],
    ids=lambda policy: type(policy).__name__,
)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_torch_counts_as_much_in_linear_layers(
    monkeypatch: pytest.MonkeyPatch, family: Any, policy: CachePolicy
) -> None:
    """Of the prefill where every layer runs for all of the tokens that reach it.

    Matrices of weights are `mm`, whatever scores is `bmm`. Layers that run for the tokens that go
    on compute less than the estimate says.
    """
    model = tiny_model(family, seed=3, attn_implementation="eager")
    prompt = torch.tensor([random_tokens(5, 200)])

    def linear_flops() -> int:
        cache = PolicyCache(policy)
        with torch.no_grad(), cache.attached(model), FlopCounterMode(display=False) as counter:
            model(prompt, cache=cache, logits_to_keep=1)
        return int(counter.get_flop_counts()["Global"][torch.ops.aten.mm])

    found = estimate(policy, shape_of(model.config), 200)
    assert linear_flops() < found.prefill.linear + found.prefill.head
    monkeypatch.setattr(PassRun, "_narrows", lambda *_: False)
    assert linear_flops() == found.prefill.linear + found.prefill.head


def test_torch_counts_twice_as_much_in_eager_attention() -> None:
    """It computes the square of which causal attention needs half."""
    model = tiny_model("llama", seed=3, attn_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.tensor([random_tokens(5, 200)]))
    products = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    assert products == 2 * estimate(FullContext(), shape_of(model.config), 200).full.attention


@pytest.mark.parametrize(
    "policy",
    [
        FullContext(),
        StreamingLLM(0.2),
        SnapKV(0.1),
        H2O(0.3),
        FastKV(tsp_layer=1, tsp_rate=0.4, retention_rate=0.2),
        SnapKV(retention_tokens=37),
        gem_filter(1, 0.2),
        StreamingLLM(0.02, num_sinks=9),
        SnapKV(0.1, protect=50),
        FastKV(tsp_layer=1, tsp_rate=0.2, retention_rate=0.1, protect=60),
        GemFilter(filter_layer=1, retention_rate=0.1, protect=43),
        AdaKV(0.1, protect=43),
        PyramidKV(0.1, protect=43),
        SnapKV(0.1, protect=1000),
    ],
    ids=lambda policy: type(policy).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_holds_as_many_bytes(policy: CachePolicy, dtype: torch.dtype) -> None:
    model = tiny_model("mistral", seed=4).to(dtype)
    cache = PolicyCache(policy)
    with torch.no_grad(), cache.attached(model):
        model(torch.tensor([random_tokens(6, 200)]), cache=cache)
    held = cache.report()
    found = estimate(policy, shape_of(model.config), 200, dtype=dtype)
    assert found.kv_bytes == held.total.held_bytes
    assert found.full_kv_bytes == held.total.full_bytes
    assert found.kept_tokens == pytest.approx([layer.kept for layer in held.layers])


def test_the_cache_holds_nearly_as_many_bytes_under_pyramid_infer() -> None:
    """Its rates are those of a long prompt: of a short one, every layer rounds down."""
    model = tiny_model("llama", seed=4)
    policy = PyramidInfer(decay_ratio=0.3, min_context=0)
    cache = PolicyCache(policy)
    with torch.no_grad(), cache.attached(model):
        model(torch.tensor([random_tokens(6, 400)]), cache=cache)
    found = estimate(policy, shape_of(model.config), 400, dtype=torch.float32)
    assert found.kv_bytes == pytest.approx(cache.report().total.held_bytes, rel=0.01)
    assert found.kv_share < 0.9


@pytest.mark.parametrize(
    ("policy", "context", "options", "error", "said"),
    [
        (FullContext, 10, {}, TypeError, "policy must be a CachePolicy"),
        (FullContext(), 0, {}, ValueError, "context_len must be at least 1, got 0"),
        (FullContext(), 1.5, {}, TypeError, "context_len must be an int"),
        (FullContext(), 10, {"dtype": "float32"}, TypeError, "dtype must be a torch.dtype"),
        (FastKV(tsp_layer=2), 10, {}, ValueError, r"tsp_layer must be in \[0, 1\]"),
    ],
)
def test_estimate_bad_input(
    policy: Any, context: Any, options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        estimate(policy, TINY, context, **options)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"hidden_size": 0}, ValueError, "hidden_size must be at least 1, got 0"),
        ({"layers": 240}, TypeError, "layers must be a tuple of LayerShape, got 240"),
        ({"layers": (240,)}, TypeError, "layers must be a tuple of LayerShape, got "),
        ({"layers": ()}, ValueError, "layers must have an entry for each layer"),
        ({"max_positions": 0}, ValueError, "max_positions must be at least 1"),
    ],
)
def test_shape_bad_input(change: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        attrs.evolve(TINY, **change)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"weights": 0}, ValueError, "weights must be at least 1, got 0"),
        ({"key_dim": 2.0}, TypeError, "key_dim must be an int"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"kv_heads": 3}, ValueError, "query_heads must be a multiple of kv_heads, got 4 and 3"),
        ({"kv_heads": 0}, ValueError, "query_heads must be a multiple of kv_heads, got 4 and 0"),
        ({"projection_weights": 529}, ValueError, "must be among the layer's 528 weights, got 529"),
        ({"float_state_elements": 1}, ValueError, "must be among the 0 state_elements, got 1"),
    ],
)
def test_layer_bad_input(change: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        attrs.evolve(LAYER, **change)
