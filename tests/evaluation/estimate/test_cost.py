"""Costs before running: counted on paper, by the cache, and as the paper has them."""

import io
import json
from functools import partial
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
TINY_WITH, LAYER_WITH = partial(attrs.evolve, TINY), partial(attrs.evolve, LAYER)


def windowed(*windows: int | None) -> ModelShape:
    """Layers with these windows."""
    return attrs.evolve(TINY, layers=tuple(attrs.evolve(LAYER, window=each) for each in windows))


def gem_filter(filter_layer: int | None = None, retention_rate: float = 0.1) -> CachePolicy:
    policy = build("gemfilter", filter_layer=filter_layer, retention_rate=retention_rate)
    assert isinstance(policy, CachePolicy)
    return policy


HALF = FastKV(tsp_layer=0, tsp_rate=0.5, retention_rate=0.25)


@pytest.mark.parametrize(
    ("policy", "shape", "context", "compute_rate", "kept"),
    [
        (FullContext(), TINY, 40, 1.0, (40, 40)),
        # A drop; a restart: layer 0 over 40 tokens, then both layers over 10.
        (HALF, TINY, 40, 0.75, (10, 10)),
        (gem_filter(1, 0.25), TINY, 40, 0.75, (10, 10)),
        # A window: the next token sees itself and the one before.
        (SnapKV(retention_rate=1.0), windowed(2, None), 40, 1.0, (1, 40)),
        (SnapKV(), windowed(40, None), 40, 1.0, (8, 8)),
        (SnapKV(), TINY, 40, 1.0, (8, 8)),
        # Of tokens that went on, spread evenly, a window holds half.
        (attrs.evolve(HALF, retention_rate=0.5), windowed(None, 10), 40, 0.75, (20, 4.5)),
        # A short prompt keeps its window.
        (FastKV(tsp_layer=0, tsp_rate=0.3, retention_rate=0.1), TINY, 20, 0.7, (8, 8)),
        (SnapKV(), TINY, 3, 1.0, (3, 3)),
        (StreamingLLM(), TINY, 1, 1.0, (1, 1)),
        # First tokens that always go on are computed.
        (
            FastKV(tsp_layer=0, tsp_rate=0.1, retention_rate=0.1, protect=22),
            TINY,
            40,
            (40 + 30) / 80,
            (30, 30),
        ),
        (
            GemFilter(filter_layer=1, retention_rate=0.1, protect=19),
            TINY,
            40,
            (40 + 2 * 20) / 80,
            (20, 20),
        ),
    ],
)
def test_on_paper(
    policy: CachePolicy,
    shape: ModelShape,
    context: int,
    compute_rate: float,
    kept: tuple[float, ...],
) -> None:
    found = estimate_cost(policy, shape, context)
    assert (found.compute_rate, found.kept_tokens) == (compute_rate, kept)
    assert found.kv_bytes == 24 * sum(kept)


def test_bytes_on_paper() -> None:
    found = estimate_cost(FullContext(), TINY, 40, answer_len=7)
    assert (found.kv_share, found.weight_bytes) == (1.0, 2000)
    assert found.kv_bytes == found.full_kv_bytes == 2 * 40 * (2 * 2 * 3 * 2)
    assert found.answered_kv_bytes == 2 * 47 * (2 * 2 * 3 * 2)
    found = estimate_cost(HALF, TINY, 40)
    assert (found.kv_bytes, found.full_kv_bytes, found.kv_share) == (480, 1920, 0.25)
    protecting = FastKV(tsp_layer=0, tsp_rate=0.1, retention_rate=0.1, protect=22)
    assert protecting.prefill_compute_rate(2) == 0.55  # of a long prompt


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
    ("build", "error", "said"),
    [
        (lambda: estimate_cost(FullContext, TINY, 10), TypeError, "policy must be a CachePolicy"),
        (
            lambda: estimate_cost(FullContext(), TINY, 0),
            ValueError,
            "context_len must be at least 1, got 0",
        ),
        (lambda: estimate_cost(FullContext(), TINY, 1.5), TypeError, "context_len must be an int"),
        (
            lambda: estimate_cost(FullContext(), TINY, 10, answer_len=-1),
            ValueError,
            "answer_len must be at least 0",
        ),
        (
            lambda: estimate_cost(FastKV(tsp_layer=2), TINY, 10),
            ValueError,
            r"tsp_layer must be in \[0, 1\]",
        ),
        (lambda: TINY_WITH(weight_bytes=-1), ValueError, "weight_bytes must be at least 0, got -1"),
        (lambda: TINY_WITH(layers=240), TypeError, "layers must be a tuple of LayerShape, got 240"),
        (lambda: TINY_WITH(layers=(240,)), TypeError, "layers must be a tuple of LayerShape, got "),
        (lambda: TINY_WITH(layers=()), ValueError, "layers must have an entry for each layer"),
        (lambda: TINY_WITH(max_positions=0), ValueError, "max_positions must be at least 1"),
        (lambda: LAYER_WITH(token_bytes=-1), ValueError, "token_bytes must be at least 0, got -1"),
        (lambda: LAYER_WITH(state_elements=2.0), TypeError, "state_elements must be an int"),
        (lambda: LAYER_WITH(window=0), ValueError, "window must be at least 1, got 0"),
    ],
)
def test_bad_input(build: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        build()
