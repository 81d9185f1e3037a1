"""Saliency of a prompt's tokens: against the model's own attention weights, and by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy import Scorer
from kvpolicy.evaluation import FilterLayerScorer, LookAheadScorer
from kvpolicy.policies import (
    AccumulatedAttentionScorer,
    LastQueryProductScorer,
    LastQueryScorer,
    WindowMaxPoolScorer,
)
from tests.reference import random_tokens, tiny_model
from tests.reference.decoder import rotate

PROMPT = random_tokens(23, 67)


def model_of(family: Any = "llama", implementation: str = "sdpa") -> PreTrainedModel:
    return tiny_model(family, seed=5, num_layers=5, attn_implementation=implementation)


def slow_look_ahead(
    model: PreTrainedModel, steps: int, kernel_size: int, ends: frozenset[int] = frozenset()
) -> list[float]:
    """Every step a forward over all tokens without a cache; pooled by hand."""
    ids, count, half = list(PROMPT), len(PROMPT), kernel_size // 2
    of_steps = []
    for _ in range(steps):
        with torch.no_grad():
            output = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
        most = [0.0] * count
        for layer in output.attentions:
            for weights in layer[0, :, -1, :count].double():
                row = (weights / weights.sum()).tolist()
                for at in range(count):
                    near = row[max(at - half, 0) : at + half + 1]
                    most[at] = max(most[at], sum(near) / kernel_size)
        of_steps.append(most)
        ids.append(int(output.logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return [sum(each) / len(of_steps) for each in zip(*of_steps, strict=True)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize(("steps", "kernel_size"), [(1, 5), (6, 1), (6, 13)])
def test_what_a_look_ahead_attends_to(family: Any, steps: int, kernel_size: int) -> None:
    want = slow_look_ahead(model_of(family, "eager"), steps, kernel_size)
    found = LookAheadScorer(steps, kernel_size).score(model_of(family), PROMPT)
    torch.testing.assert_close(found.values.tolist(), want, rtol=1e-3, atol=1e-5)
    assert max(want) > 3 / len(PROMPT) / kernel_size  # attention is peaked
    assert found.unscored_tail == 0


def test_a_prompt_in_several_forwards() -> None:
    whole = LookAheadScorer(4).score(model_of(), PROMPT).values
    parts = LookAheadScorer(4, forward_tokens=9).score(model_of(), PROMPT).values
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


def test_a_look_ahead_ends_with_the_answer() -> None:
    model = model_of()
    greedy: Any = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=3)
    end = int(greedy[0, -1])
    assert end not in greedy[0, len(PROMPT) : -1].tolist()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [1, end]
    found = LookAheadScorer(8, 3).score(model, PROMPT).values
    ended = slow_look_ahead(model_of("llama", "eager"), 8, 3, frozenset({end}))
    torch.testing.assert_close(found.tolist(), ended, rtol=1e-3, atol=1e-5)
    longer = slow_look_ahead(model_of("llama", "eager"), 8, 3)
    assert (found - torch.tensor(longer)).abs().max() > 1e-3


def slow_products(model: PreTrainedModel, layer: int, kernel_size: int) -> list[float]:
    """Raw products of the last query with all keys, mean over heads, pooled by hand."""
    config, count = model.config, len(PROMPT)
    width = config.hidden_size // config.num_attention_heads
    seen: list[Tensor] = []
    module = model.model.layers[layer].self_attn.q_proj
    hook = module.register_forward_hook(lambda _, __, output: seen.append(output))
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([PROMPT]), cache=cache)
    hook.remove()
    theta = config.rope_parameters["rope_theta"]
    heads = seen[0][0, -1].view(-1, width)
    keys = cache.layers[layer].keys[0]
    group = len(heads) // len(keys)
    sums = [0.0] * count
    for head, query in enumerate(heads):
        turned = rotate(query, count - 1, theta)
        for at in range(count):
            sums[at] += float(turned @ keys[head // group, at]) / len(heads)
    half = kernel_size // 2
    return [sum(sums[max(at - half, 0) : at + half + 1]) / kernel_size for at in range(count)]


@pytest.mark.parametrize(("layer", "acting"), [(None, 1), (0, 0), (3, 3), (4, 4)])
def test_products_at_a_filter_layer(layer: int | None, acting: int) -> None:
    scorer = FilterLayerScorer(LastQueryProductScorer(kernel_size=3), layer)
    found = scorer.score(model_of(), PROMPT)
    want = slow_products(model_of(), acting, 3)
    torch.testing.assert_close(found.values.tolist(), want, rtol=1e-3, atol=1e-4)
    assert found.source == f"LastQueryProductScorer(kernel_size=3) at layer {acting}"


@pytest.mark.parametrize("scorer", [LastQueryScorer(), AccumulatedAttentionScorer()])
def test_attention_at_a_filter_layer(scorer: Scorer) -> None:
    with torch.no_grad():
        output = model_of("llama", "eager")(torch.tensor([PROMPT]), output_attentions=True)
    weights = output.attentions[2][0].mean(dim=0)
    want = weights[-1] if scorer.num_queries == 1 else weights.sum(dim=0)
    found = FilterLayerScorer(scorer, 2).score(model_of(), PROMPT)
    torch.testing.assert_close(found.values, want, rtol=1e-3, atol=1e-5)


def test_a_tail_without_saliency_is_told() -> None:
    assert FilterLayerScorer(WindowMaxPoolScorer(6), 2).score(model_of(), PROMPT).unscored_tail == 6


def test_layers_after_the_filter_layer_do_not_read_the_prompt() -> None:
    model = model_of()
    lengths: dict[int, int] = {}

    def note(index: int) -> Any:
        def hook(_: Any, arguments: tuple[Tensor], __: Any) -> None:
            lengths[index] = max(lengths.get(index, 0), arguments[0].shape[1])

        return hook

    # Of a layer's MLP, which a filter layer does not reach with the prompt either.
    hooks = [
        each.mlp.register_forward_hook(note(index)) for index, each in enumerate(model.model.layers)
    ]
    FilterLayerScorer(filter_layer=2).score(model, PROMPT)
    for each in hooks:
        each.remove()
    assert lengths == {0: len(PROMPT), 1: len(PROMPT), 2: 1, 3: 1, 4: 1}


@pytest.mark.parametrize(
    ("kind", "given", "error", "said"),
    [
        (LookAheadScorer, {"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        (LookAheadScorer, {"steps": 1.5}, TypeError, "steps must be an int"),
        (LookAheadScorer, {"kernel_size": 4}, ValueError, "kernel_size must be odd"),
        (LookAheadScorer, {"forward_tokens": 0}, ValueError, "forward_tokens must be at least 1"),
        (FilterLayerScorer, {"filter_layer": -1}, ValueError, "filter_layer must be at least 0"),
        (FilterLayerScorer, {"scorer": "last"}, TypeError, "scorer must be a Scorer, got 'last'"),
    ],
)
def test_bad_configurations(
    kind: Any, given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        kind(**given)


def test_bad_prompts_leave_the_model_usable() -> None:
    model = model_of()
    for scorer in (FilterLayerScorer(), LookAheadScorer(2)):
        with pytest.raises(ValueError, match="input_ids must be in"):
            scorer.score(model, [10**6])
    with pytest.raises(ValueError, match=r"filter_layer must be in \[0, 4\] .* got 5"):
        FilterLayerScorer(filter_layer=5).score(model, PROMPT)
    found = FilterLayerScorer(filter_layer=4).score(model, PROMPT)
    torch.testing.assert_close(
        found.values, FilterLayerScorer(filter_layer=4).score(model_of(), PROMPT).values
    )


def test_no_layer_sees_the_whole_prompt() -> None:
    model = model_of("mistral")
    model.config.sliding_window = 16
    small = type(model)(model.config).eval()
    with pytest.raises(ValueError, match="must have a layer that sees all of the prompt's 67"):
        LookAheadScorer(2).score(small, PROMPT)
