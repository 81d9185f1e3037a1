"""Costs before running: counted on paper, by the cache, and as the paper has them."""

import io
import json
from typing import Any

import attrs
import pytest
import torch
from rich.console import Console
from torch import Tensor

from kvpolicy import CachePolicy, KVSelector, LayerContext, build
from kvpolicy.evaluation import LayerShape, ModelShape, estimate_cost, load_shape, shape_of
from kvpolicy.evaluation.estimate.table import estimate_table, notes_of
from kvpolicy.evaluation.variant import Variant
from kvpolicy.integrations.transformers import PolicyCache
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
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.support.content import MassPropagation
from tests.reference import random_tokens, tiny_model

LLAMA, MINISTRAL, NEMO = "llama-3.1-8b", "ministral-8b", "mistral-nemo-12b"

# Keys and values of 2 heads of 3, in bfloat16.
LAYER = LayerShape("full attention", token_bytes=24)
TINY = ModelShape("tiny", (LAYER, LAYER), weight_bytes=2000)


def windowed(*windows: int | None) -> ModelShape:
    """Layers with these windows."""
    return attrs.evolve(TINY, layers=tuple(attrs.evolve(LAYER, window=each) for each in windows))


def gem_filter(filter_layer: int | None = None, retention_rate: float = 0.1) -> CachePolicy:
    policy = build("gemfilter", filter_layer=filter_layer, retention_rate=retention_rate)
    assert isinstance(policy, CachePolicy)
    return policy


def test_full_context_on_paper() -> None:
    found = estimate_cost(FullContext(), TINY, 40, answer_len=7)
    assert (found.compute_rate, found.kv_share, found.weight_bytes) == (1.0, 1.0, 2000)
    assert found.kv_bytes == found.full_kv_bytes == 2 * 40 * (2 * 2 * 3 * 2)
    assert found.answered_kv_bytes == 2 * 47 * (2 * 2 * 3 * 2)


def test_what_content_decides_is_not_known() -> None:
    part = MassPropagation((0,))
    policy = CachePolicy(WindowMaxPoolScorer(4), GQAGroupSelector(0.5, window_size=4), part)
    found = estimate_cost(policy, TINY, 40)
    assert found.compute_rate is None
    assert found.kept_tokens == (20.0, 20.0)  # the most
    data = found.as_data()
    assert data["prefill_compute_rate"] is None
    json.dumps(data)
    variant = Variant("mass", policy)
    shown = io.StringIO()
    Console(width=80, file=shown).print(estimate_table([variant], [found]))
    cells = shown.getvalue().splitlines()[2].split()
    assert cells[:4] == ["mass", "-", "-", "20"]
    (note,) = (note for note in notes_of(TINY, 40, [variant]) if "content" in note)
    assert note.startswith("mass decides by the prompt's content how many tokens go on")


def test_a_drop_on_paper() -> None:
    policy = FastKV(tsp_layer=0, tsp_rate=0.5, retention_rate=0.25)
    found = estimate_cost(policy, TINY, 40)
    assert found.compute_rate == 0.75
    assert found.kept_tokens == (10.0, 10.0)
    assert (found.kv_bytes, found.full_kv_bytes, found.kv_share) == (480, 1920, 0.25)


def test_a_restart_on_paper() -> None:
    """Layer 0 over 40 tokens; then both layers over 10."""
    found = estimate_cost(gem_filter(1, 0.25), TINY, 40)
    assert found.compute_rate == 0.75
    assert found.kept_tokens == (10.0, 10.0)


def test_a_window_on_paper() -> None:
    """The next token sees itself and the one before."""
    shape = windowed(2, None)
    found = estimate_cost(SnapKV(retention_rate=1.0), shape, 40)
    assert found.kept_tokens == (1.0, 40.0)
    within = windowed(40, None)
    assert estimate_cost(SnapKV(), within, 40) == estimate_cost(SnapKV(), TINY, 40)


@pytest.mark.parametrize(("length", "kept"), [(16, 16), (17, 1), (40, 8), (47, 15), (48, 0)])
def test_chunks_hold_what_the_next_token_sees(length: int, kept: int) -> None:
    """Chunks of 16: token 40 sees tokens 32 to 39, and token 48 begins a chunk."""
    chunk = attrs.evolve(LAYER, window=16, chunked=True)
    shape = attrs.evolve(TINY, layers=(chunk, LAYER))
    assert estimate_cost(FullContext(), shape, length).kept_tokens == (kept, length)
    # Half of the tokens reach it, spread evenly: so does half of what the next one sees.
    shape = attrs.evolve(TINY, layers=(LAYER, chunk))
    half = FastKV(tsp_layer=0, tsp_rate=0.5, retention_rate=0.5, window_size=1)
    assert estimate_cost(half, shape, length).kept_tokens == (length / 2, kept / 2)


def test_a_state_on_paper() -> None:
    recurrent = LayerShape("recurrent", state_bytes=100)
    shape = attrs.evolve(TINY, layers=(LAYER, recurrent))
    policy = FastKV(tsp_layer=0, tsp_rate=0.5, retention_rate=0.25)
    found = estimate_cost(policy, shape, 40)
    assert found.state_bytes == 100
    assert found.kv_bytes == 10 * 12 * 2 + found.state_bytes
    assert found.full_kv_bytes == 40 * 12 * 2 + found.state_bytes
    assert (found.kept_tokens, found.mean_kept) == ((10.0, 0.0), 10.0)


def test_a_layer_with_anothers_keys_on_paper() -> None:
    """It holds nothing, neither of the prompt nor of the answer."""
    borrowing = attrs.evolve(LAYER, token_bytes=0)
    shape = attrs.evolve(TINY, layers=(LAYER, borrowing))
    found = estimate_cost(SnapKV(0.25), shape, 40, answer_len=3)
    assert (found.kv_bytes, found.answered_kv_bytes) == (10 * 12 * 2, 13 * 12 * 2)


def test_of_tokens_that_went_on_a_window_holds_fewer() -> None:
    """Half of the tokens, spread evenly: half of the window."""
    shape = windowed(None, 10)
    found = estimate_cost(FastKV(tsp_layer=0, tsp_rate=0.5, retention_rate=0.5), shape, 40)
    assert found.kept_tokens == (20.0, 0.5 * 9)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3"])
def test_the_cache_keeps_as_many_tokens_in_windows(family: str) -> None:
    model = FAMILIES[family].build(seed=4)
    cache = PolicyCache(SnapKV(0.25))
    with torch.no_grad(), cache.attached(model):
        model(torch.tensor([random_tokens(6, 200)]), cache=cache)
    held = cache.report()
    shape = shape_of(model.config, dtype=torch.float32)
    assert len({layer.window for layer in shape.layers}) == 2
    found = estimate_cost(SnapKV(0.25), shape, 200)
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
    assert estimate_cost(policy, shape, 100).kept_tokens == pytest.approx((100, 50, 20, 10))


def test_a_short_prompt_keeps_its_window() -> None:
    found = estimate_cost(FastKV(tsp_layer=0, tsp_rate=0.3, retention_rate=0.1), TINY, 20)
    assert found.kept_tokens == (8.0, 8.0)
    assert estimate_cost(SnapKV(), TINY, 3).kept_tokens == (3.0, 3.0)
    assert estimate_cost(StreamingLLM(), TINY, 1).kept_tokens == (1.0, 1.0)


def test_first_tokens_that_always_go_on_are_computed() -> None:
    policy = FastKV(tsp_layer=0, tsp_rate=0.1, retention_rate=0.1, protect=22)
    found = estimate_cost(policy, TINY, 40)
    assert found.kept_tokens == (30.0, 30.0)
    assert found.compute_rate == (40 + 30) / 80
    assert policy.prefill_compute_rate(2) == 0.55  # of a long prompt
    restart = GemFilter(filter_layer=1, retention_rate=0.1, protect=19)
    assert estimate_cost(restart, TINY, 40).compute_rate == (40 + 2 * 20) / 80


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
    assert round(100 * estimate_cost(policy, load_shape(preset), 32768).compute_rate) == percent


def test_pyramid_keeps_what_reaches_each_layer() -> None:
    """Its retention is its compute rate, in the paper 60/60."""
    found = estimate_cost(PyramidInfer(), load_shape(LLAMA), 32768)
    assert found.kv_share == pytest.approx(found.compute_rate)


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
    found = estimate_cost(policy, shape_of(model.config, dtype=dtype), 200)
    assert found.kv_bytes == held.total.held_bytes
    assert found.full_kv_bytes == held.total.full_bytes
    assert found.kept_tokens == pytest.approx([layer.kept for layer in held.layers])


@pytest.mark.parametrize("answer", [7, 8, 21])
@pytest.mark.parametrize("bound", [None, 20, 90, 500])
@pytest.mark.parametrize(
    "family",
    ["mistral", "gemma3", "gpt_oss", "llama4_text_mixed", "deepseek_v3", "qwen3_next", "gemma4"],
)
def test_the_cache_holds_as_many_bytes_after_an_answer(
    family: str, bound: int | None, answer: int
) -> None:
    """Full attention, windows, chunks, latents, states and shared keys; bounds every 8 tokens."""
    built = FAMILIES.get(family)
    model = builds()[family].model() if built is None else built.build(seed=4)
    policy: CachePolicy = SnapKV(0.25, window_size=4)
    if bound is not None:
        policy = attrs.evolve(policy, decoding=SnapKV().decoding_rule(bound, 8))
    cache = PolicyCache(policy)
    with torch.no_grad(), cache.attached(model):
        model(torch.tensor([random_tokens(6, 200)]), cache=cache)
        for token in random_tokens(7, answer):
            model(torch.tensor([[token]]), cache=cache)
    shape = shape_of(model.config, dtype=torch.float32)
    found = estimate_cost(policy, shape, 200, answer_len=answer)
    assert found.answered_kv_bytes == cache.report().total.held_bytes


def test_the_cache_holds_nearly_as_many_bytes_under_pyramid_infer() -> None:
    """Its rates are those of a long prompt: of a short one, every layer rounds down."""
    model = tiny_model("llama", seed=4)
    policy = PyramidInfer(decay_ratio=0.3, min_context=0)
    cache = PolicyCache(policy)
    with torch.no_grad(), cache.attached(model):
        model(torch.tensor([random_tokens(6, 400)]), cache=cache)
    found = estimate_cost(policy, shape_of(model.config, dtype=torch.float32), 400)
    assert found.kv_bytes == pytest.approx(cache.report().total.held_bytes, rel=0.01)
    assert found.kv_share < 0.9


@pytest.mark.parametrize(
    ("policy", "context", "options", "error", "said"),
    [
        (FullContext, 10, {}, TypeError, "policy must be a CachePolicy"),
        (FullContext(), 0, {}, ValueError, "context_len must be at least 1, got 0"),
        (FullContext(), 1.5, {}, TypeError, "context_len must be an int"),
        (FullContext(), 10, {"answer_len": -1}, ValueError, "answer_len must be at least 0"),
        (FastKV(tsp_layer=2), 10, {}, ValueError, r"tsp_layer must be in \[0, 1\]"),
    ],
)
def test_estimate_bad_input(
    policy: Any, context: Any, options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        estimate_cost(policy, TINY, context, **options)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"weight_bytes": -1}, ValueError, "weight_bytes must be at least 0, got -1"),
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
        ({"token_bytes": -1}, ValueError, "token_bytes must be at least 0, got -1"),
        ({"state_elements": 2.0}, TypeError, "state_elements must be an int"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
    ],
)
def test_layer_bad_input(change: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        attrs.evolve(LAYER, **change)
