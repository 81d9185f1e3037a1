"""Decoder families made by hand: held against their own dense attention, or refused with a reason.

Every policy on some sixty; `make families` holds every decoder of Transformers with four.
"""

from functools import cache
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, LayerContext, registered
from kvpolicy.errors import UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.model import check
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import (
    AccumulatedAttentionScorer,
    BlockProductScorer,
    FastKV,
    GemFilter,
    GQAGroupSelector,
    KeepAllSelector,
    PassAllPropagation,
    PyramidInfer,
    TokenSelectivePropagation,
)
from tests.families import FAMILIES, VOCAB_SIZE
from tests.integrations.support.conversation import left_padded
from tests.integrations.support.versions import NO_QUERIES
from tests.reference.dense import Act
from tests.reference.family_dense import family_logits

# Whose scores depend on the columns of keys, or which holds no keys: see test_refused.py.
REFUSED = ("bloom", "falcon_alibi", "mamba", "mpt")
# Layers with a state among those with keys: tests/integrations/hybrids holds them.
HYBRIDS = ("granitemoehybrid", "jamba", "lfm2", "qwen3_5", "qwen3_next")
# Their attention shows no queries.
UNSEEN = ("falcon", "falcon_multi_query", "gpt_neo", *NO_QUERIES)
# No rotary embedding, or keys that are more than turned; heads that share what is stored.
UNTURNED = ("gpt2", "gpt_bigcode", "hunyuan_v1_dense", "opt")
if not NO_QUERIES:  # which turn queries and keys by tables of their own
    UNTURNED = (*UNTURNED, "codegen", "gptj")
UNPROJECTED = ("deepseek_v2", "deepseek_v3")
# Layers that attend to an earlier one's keys, which no second reading knows.
SHARING = ("gemma3n", "gemma4")
SUPPORTED = [name for name in FAMILIES if name not in (*REFUSED, *HYBRIDS)]
LENS = (50, 34)
DECODED = 4
TOLERANCE = 2e-4


@cache
def model_of(name: str, implementation: str | None = None) -> PreTrainedModel:
    return FAMILIES[name].build(seed=1, attn_implementation=implementation)


def tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE, (count,), generator=generator).tolist()


ROWS = [tokens(row, length) for row, length in enumerate(LENS)]
IDS, MASK = left_padded(ROWS)


def generate(model: PreTrainedModel, store: Any) -> Any:
    return model.generate(
        IDS,
        attention_mask=MASK,
        **{CACHE: store},
        max_new_tokens=1 + DECODED,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def suited(policy_name: str, model: PreTrainedModel) -> CachePolicy:
    """The registered policy at a rate that evicts much, dropping where all tokens are seen."""
    parts = ModelParts(model)
    full = [index for index in parts.attending if parts.windows[index] is None]
    if policy_name == "fastkv":
        return FastKV(tsp_layer=full[0] if full else None, tsp_rate=0.5, retention_rate=0.3)
    if policy_name == "gemfilter":
        return GemFilter(retention_rate=0.4)
    if policy_name == "pyramidinfer":
        return PyramidInfer(recent_rate=0.2, decay_ratio=0.5, min_context=4)
    factory: Any = registered("policy")[policy_name]
    first = full[0] if full else 0
    dropping: dict[str, dict[str, Any]] = {
        "claa": {"tsp_layer": first, "retention_rate": 0.3, "tsp_rate": 0.5, "whole_layers": 1},
        "uniprefill": {"tsp_layers": full[:2] or [0], "mass": 0.6, "chunk_size": 4}
        | {"num_sinks": 2, "window_size": 3},
        "promptdistill": {"tsp_layer": first, "tsp_rate": 0.4},
        "spirekv": {"tsp_layer": first, "retention_rate": 0.3, "tsp_rate": 0.5},
        "lazyllm": {"tsp_layers": full[:2] or [0], "tsp_rate": 0.6},
    }
    if policy_name in dropping:
        return factory(**dropping[policy_name])
    if policy_name == "sliminfer":  # whose own stages are those of larger models
        stage = TokenSelectivePropagation(tsp_layer=first, tsp_rate=0.4, window_size=4)
        return CachePolicy(
            BlockProductScorer(window_size=4, chunk_size=2, block_chunks=2),
            KeepAllSelector(),
            stage,
        )
    if policy_name in ("full_context", "fastv"):  # these take no rate; here are no images
        return factory()
    return factory(retention_rate=0.3)


def act_of(store: PolicyCache, row: int) -> Act:
    """What one row's prompt left: kept positions, and what reached each layer."""
    kept, reached, now = [], [], list(range(LENS[row]))
    for index, layer in enumerate(store.layers):
        held = layer.positions[row, :, : layer.positions.shape[2] - DECODED]
        kept.append([[p for p in head if p >= 0] for head in held.tolist()])
        reached.append(now if layer.producer is None else reached[layer.producer])
        if index in store.propagated:
            now = [p for p in store.propagated[index][row].tolist() if p >= 0]
    return Act(0, LENS[row], kept, reached)


def expected_logits(
    model: PreTrainedModel, store: PolicyCache, row: int, said: list[int]
) -> Tensor:
    act = act_of(store, row)
    ids = ROWS[row]
    if store.policy.propagation.restarts:  # the chosen tokens are a prompt of their own
        (chosen,) = store.propagated.values()
        ids = [ids[p] for p in chosen[row].tolist() if p >= 0]
        everything = [[list(range(len(ids)))] for _ in store.layers]
        act = Act(0, len(ids), everything)
    return family_logits(model, ids + said, act)[len(ids) - 1 :]


@pytest.mark.parametrize("name", sorted(registered("policy")))
@pytest.mark.parametrize("family", SUPPORTED)
def test_every_policy_gives_what_dense_attention_gives(family: str, name: str) -> None:
    """A padded batch of two; each row against the family's eager attention without a cache."""
    model, eager = model_of(family), model_of(family, "eager")
    windows = ModelParts(model).windows
    policy = suited(name, model)
    store = PolicyCache(policy)
    acting = policy.propagation.acting_layers(len(windows))
    if policy.rereading is not None and family in SHARING:
        with pytest.raises(UnsupportedModelError, match="rereading of"):
            generate(model, store)
        return
    if (policy.num_queries != 0 or policy.rereading is not None) and family in UNSEEN:
        with pytest.raises(UnsupportedModelError, match="shows no queries: it reads"):
            generate(model, store)
        return
    if any(windows[layer] for layer in acting) or (any(windows) and name == "gemfilter"):
        with pytest.raises(UnsupportedModelError, match=r"sliding window|keys of their own"):
            generate(model, store)
        assert store.get_seq_length() == 0
        return
    if (policy.needs_rotary and family in UNTURNED) or (
        policy.needs_output_weight and family in UNPROJECTED
    ):
        told = "that a policy can read|must not rotate keys or read output weights"
        with pytest.raises(UnsupportedModelError, match=told):
            generate(model, store)
        assert store.get_seq_length() == 0
        return
    output = generate(model, store)
    found = torch.stack(output.logits, dim=1)
    for row in range(len(ROWS)):
        said = output.sequences[row, LENS[0] : -1].tolist()
        want = expected_logits(eager, store, row, said)
        difference = float((found[row] - want).abs().max())
        assert difference < TOLERANCE * max(1.0, float(want.abs().max())), (name, row)


@pytest.mark.parametrize(
    "family", [name for name in SUPPORTED if FAMILIES[name].window and name not in UNSEEN]
)
def test_a_sliding_layer_keeps_its_window(family: str) -> None:
    """What the next token can see there, all of it; the policy chooses in the other layers."""
    model = model_of(family)
    parts = ModelParts(model)
    store = PolicyCache(suited("snapkv", model))
    generate(model, store)
    assert any(parts.windows)
    for layer, window in zip(store.layers, parts.windows, strict=True):
        kept = layer.positions[0, :, : layer.positions.shape[2] - DECODED]
        if window is None:
            assert kept.shape[1] == int(0.3 * LENS[0])
        else:
            assert kept.tolist() == [list(range(LENS[0] - window + 1, LENS[0]))] * kept.shape[0]


@attrs.frozen
class Showing(GQAGroupSelector):
    """Remembers each layer's saliency."""

    seen: list[Tensor] = attrs.field(factory=list, kw_only=True)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        assert saliency is not None
        self.seen.append(saliency)
        return super().select(saliency, context)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_scores_are_the_models_own_attention(family: str) -> None:
    """Also where a sink takes a share of it, and where it is capped."""
    model = FAMILIES[family].build(seed=1, attn_implementation="eager")
    if family == "gpt_oss":
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.data.uniform_(2.0, 6.0)
    selector = Showing(0.5)
    cache = PolicyCache(CachePolicy(AccumulatedAttentionScorer(), selector, PassAllPropagation()))
    ids = IDS[:1, :12]  # within every window
    with torch.no_grad():
        own = model(ids, output_attentions=True).attentions
        with cache.attached(model):
            model(ids, cache=cache)
    assert len(selector.seen) == len(own)
    for saliency, attention in zip(selector.seen, own, strict=True):
        torch.testing.assert_close(saliency, attention.sum(dim=2), atol=1e-5, rtol=1e-4)
    if family == "gpt_oss":
        assert float(own[0].sum(dim=-1).min()) < 0.5  # the sinks take much of it


def test_an_unknown_family_is_checked_on_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a class and configuration; what is wrong is refused, by what differed."""
    monkeypatch.setattr(check, "_verdicts", {})  # whatever other tests have had checked
    model, reads = FAMILIES["llama"].build(seed=3), []
    model.config.model_type = "llama_of_tomorrow"
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda *_: reads.append(1))
    with PolicyCache(FastKV()).attached(model):
        once = len(reads)
    with PolicyCache(FastKV()).attached(model):
        assert len(reads) == once > 0
    handle.remove()
    other = FAMILIES["llama"].build(seed=3)
    other.config.model_type = "llama_of_tomorrow"
    other.config.initializer_range = 0.021  # another configuration
    hold = PolicyLayer._hold

    def unpaired(layer: PolicyLayer, keys: Tensor, *others: Any, **how: Any) -> None:
        hold(layer, keys.roll(1, dims=2), *others, **how)

    monkeypatch.setattr(PolicyLayer, "_hold", unpaired)
    cache = PolicyCache(FastKV())
    with pytest.raises(
        UnsupportedModelError, match="found wrong logits under a policy that evicts"
    ):
        generate(other, cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("family", ["phi3", "phimoe"])
def test_a_context_at_which_generate_would_drop_the_cache(family: str) -> None:
    model = FAMILIES[family].build(seed=1)
    model.config.original_max_position_embeddings = 52
    with pytest.raises(UnsupportedGenerationError, match="must stay within original_max_position"):
        generate(model, PolicyCache(FastKV()))
    default = IDS[:1, : 52 - 19]  # Transformers decodes 20 tokens if it is told nothing
    with pytest.raises(UnsupportedGenerationError, match="got 33 and 20"):
        model.generate(default, cache=PolicyCache(FastKV()))
    model.config.original_max_position_embeddings = 60
    generate(model, PolicyCache(FastKV()))


def test_router_logits_of_tokens_that_are_dropped() -> None:
    model = model_of("mixtral")
    cache = PolicyCache(FastKV(tsp_rate=0.5, retention_rate=0.3))
    with (
        torch.no_grad(),
        cache.attached(model),
        pytest.raises(ValueError, match="output_router_logits must not be given if"),
    ):
        model(IDS[:1], cache=cache, output_router_logits=True)
