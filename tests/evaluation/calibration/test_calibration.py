"""Choosing the TSP layer: the distances, what they cost, the choice, and bad input."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation import (
    LayerDistance,
    TSPDistances,
    load,
    measure_tsp_distances,
    needle_prompts,
    select_tsp_layer,
)
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import KeepAllSelector, TokenSelectivePropagation, WindowMaxPoolScorer
from tests.reference import FAMILIES, VOCAB_SIZE, random_tokens, tiny_model

NUM_LAYERS = 5


@cache
def model_of(family: str, implementation: str = "sdpa") -> PreTrainedModel:
    return tiny_model(  # type: ignore[arg-type]
        family, seed=3, num_layers=NUM_LAYERS, attn_implementation=implementation
    )


def tokens(seed: int, length: int) -> Tensor:
    return torch.tensor(random_tokens(seed, length))


@torch.no_grad()
def last_state(model: PreTrainedModel, ids: Tensor, layer: int | None, rate: float) -> Tensor:
    """The last token's final hidden state; run as the model runs, with a drop after a layer."""
    if layer is None:
        return model.get_decoder()(ids[None]).last_hidden_state[0, -1].double()
    scorer, drop = (
        WindowMaxPoolScorer(4, kernel_size=3),
        TokenSelectivePropagation(tsp_layer=layer, tsp_rate=rate, window_size=4),
    )
    cache = PolicyCache(CachePolicy(scorer, KeepAllSelector(), drop))
    with cache.attached(model):
        output = model.get_decoder()(ids[None], cache=cache)
    return output.last_hidden_state[0, -1].double()


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[Counter[tuple[int, int]]]:
    """Calls of decoder layers, by layer and number of tokens."""
    calls: Counter[tuple[int, int]] = Counter()

    def counter(index: int) -> Any:
        def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            calls[index, args[0].shape[1]] += 1

        return count

    layers = model.get_decoder().layers
    handles = [layer.register_forward_pre_hook(counter(i)) for i, layer in enumerate(layers)]
    yield calls
    for handle in handles:
        handle.remove()


def hooks_of(model: PreTrainedModel) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_as_running_the_model_for_each_layer(family: str, implementation: str) -> None:
    model, ids = model_of(family, implementation), tokens(0, 61)
    found = measure_tsp_distances(model, [ids], 0.3, NUM_LAYERS - 1, window_size=4, kernel_size=3)
    full = last_state(model, ids, None, 0.3)
    assert len(found.layers) == NUM_LAYERS
    for layer in range(NUM_LAYERS - 1):
        expected = float((last_state(model, ids, layer, 0.3) - full).square().sum())
        assert expected > 0.01 * float(full @ full)  # the drop matters
        assert found.layers[layer].squared == pytest.approx(expected, rel=1e-4)
        assert found.layers[layer].normalised == pytest.approx(
            expected / float(full @ full), rel=1e-4
        )
    assert found.layers[-1].squared == 0.0  # nothing comes after the last layer


def test_means_over_inputs() -> None:
    """Of inputs of several lengths, in any order, each as ``[len]`` or ``[1, len]``."""
    model = model_of("llama")
    inputs = [tokens(0, 37), tokens(1, 61)[None], tokens(2, 23)]
    together = measure_tsp_distances(model, inputs, max_layer=3)
    alone = [measure_tsp_distances(model, [each.flatten()], max_layer=3) for each in inputs]
    assert together.input_lengths == (37, 61, 23)
    for layer, found in enumerate(together.layers):
        each = [single.layers[layer] for single in alone]
        assert found.tsp_layer == layer
        assert found.squared == pytest.approx(sum(one.squared for one in each) / 3)
        assert found.normalised == pytest.approx(sum(one.normalised for one in each) / 3)
        assert found.worst == pytest.approx(max(one.normalised for one in each))
        assert each[0].normalised == each[0].worst
    again = measure_tsp_distances(model, inputs[::-1], max_layer=3)
    for one, other in zip(together.layers, again.layers, strict=True):
        assert one.squared == pytest.approx(other.squared, rel=1e-9)
    assert again.input_lengths == (23, 61, 37)


def test_cost_is_one_full_pass_and_the_later_layers_of_each_candidate() -> None:
    model = model_of("qwen3")
    with counted(model) as calls:
        select_tsp_layer(model, [tokens(0, 60), tokens(1, 40)], 0.25, max_layer=3)
    expected = Counter({(layer, length): 1 for layer in range(NUM_LAYERS) for length in (60, 40)})
    for candidate in range(4):
        for layer in range(candidate + 1, NUM_LAYERS):
            expected[layer, 15] += 1  # int(0.25 * 60)
            expected[layer, 10] += 1
    assert calls == expected


def test_a_rate_of_one_passes_everything_and_costs_one_pass() -> None:
    model = model_of("llama")
    with counted(model) as calls:
        found = select_tsp_layer(model, [tokens(0, 40)], 1.0, max_layer=3)
    assert calls == Counter({(layer, 40): 1 for layer in range(NUM_LAYERS)})
    assert [each.squared for each in found.distances.layers] == [0.0] * 4
    assert found.layer == 0  # the earliest of equals


def test_defaults_and_compute_rates() -> None:
    """By hand, 5 layers at rate 0.2: layer 0 computes 1 + 4 * 0.2 of 5 layers, layer 1 2.6."""
    found = select_tsp_layer(model_of("llama"), [tokens(0, 40)])
    assert [each.tsp_layer for each in found.distances.layers] == [0, 1]  # 5 // 2 - 1
    rates = [each.compute_rate for each in found.distances.layers]
    assert rates == pytest.approx([1.8 / 5, 2.6 / 5])
    assert (found.criterion, found.tolerance) == ("argmin", 0.01)
    assert (found.distances.num_layers, found.distances.tsp_rate) == (5, 0.2)
    one_layer = tiny_model("llama", seed=3, num_layers=1)
    assert select_tsp_layer(one_layer, [tokens(0, 40)]).layer == 0


def table(*distances: tuple[float, float]) -> TSPDistances:
    layers = (LayerDistance(i, 0.5, far, part, part) for i, (far, part) in enumerate(distances))
    return TSPDistances(tuple(layers), 9, 0.2, (50,))


def test_the_criteria_by_hand() -> None:
    """The two read different numbers: argmin the squared distance, earliest the normalised one."""
    distances = table((9.0, 0.5), (3.0, 0.04), (1.0, 0.06), (1.0, 0.01), (2.0, 0.001))
    assert distances.choose() == 2  # the earliest of equals
    assert distances.choose("earliest", 0.05) == 1
    assert distances.choose("earliest", 0.04) == 1  # at most
    assert distances.choose("earliest", 0.0399) == 3
    assert distances.choose("earliest") == 3
    assert distances.choose("earliest", 0.6) == 0
    with pytest.raises(
        ValueError, match=r"up to max_layer 4, but the closest, 4, is at 0.001, got 0.0001; raise"
    ):
        distances.choose("earliest", 0.0001)


def test_data() -> None:
    found = select_tsp_layer(model_of("llama"), [tokens(0, 40)], max_layer=2, criterion="argmin")
    data = found.as_data()
    assert data["tsp_layer"] == found.layer
    assert data["input_lengths"] == [40]
    assert [each["tsp_layer"] for each in data["layers"]] == [0, 1, 2]
    assert data["layers"][1]["squared"] == found.distances.layers[1].squared


def test_the_bundled_model() -> None:
    """Two hops take the layers up to 2: dropping before loses the answer, after does not."""
    model = load().model
    inputs = [torch.tensor(prompt.input_ids) for prompt in needle_prompts(256, 8, seed=2000)]
    distances = measure_tsp_distances(model, inputs)
    assert [each.normalised < 0.01 for each in distances.layers] == [False, False, True]
    assert distances.layers[1].worst > 0.3
    assert distances.choose("argmin") == distances.choose("earliest") == 2


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"calibration_inputs": []}, ValueError, "at least one input"),
    ({"calibration_inputs": tokens(0, 40)}, TypeError, "a sequence of int64 tensors"),
    ({"calibration_inputs": 3}, TypeError, "a sequence of int64 tensors .* got int"),
    ({"calibration_inputs": [[1, 2, 3]]}, TypeError, r"calibration_inputs\[0\] .* got list"),
    ({"calibration_inputs": [tokens(0, 40).float()]}, TypeError, "got dtype torch.float32"),
    ({"calibration_inputs": [tokens(0, 40).int()]}, TypeError, "got dtype torch.int32"),
    (
        {"calibration_inputs": [tokens(0, 40), tokens(0, 40).view(2, 20)]},
        ValueError,
        r"calibration_inputs\[1\] must be \[len\] or \[1, len\], got \[2, 20\]",
    ),
    ({"calibration_inputs": [torch.tensor(3)]}, ValueError, r"got \[\]"),
    (
        {"calibration_inputs": [tokens(0, 40), tokens(0, 8)]},
        ValueError,
        r"calibration_inputs\[1\] must be longer than window_size, 8 tokens, got 8",
    ),
    (
        {"calibration_inputs": [tokens(0, 40) + VOCAB_SIZE - 1]},
        ValueError,
        rf"token ids in \[0, {VOCAB_SIZE - 1}\]",
    ),
    ({"calibration_inputs": [tokens(0, 40) - 98]}, ValueError, "got ids from -"),
    ({"max_layer": 5}, ValueError, r"max_layer must be in \[0, 4\] for a model of 5 layers, got 5"),
    ({"max_layer": -1}, ValueError, "max_layer must be at least 0"),
    ({"max_layer": 1.0}, TypeError, "max_layer must be an int"),
    ({"tsp_rate": 0.0}, ValueError, r"tsp_rate must be in \(0, 1\], got 0.0"),
    ({"tsp_rate": 1.1}, ValueError, r"tsp_rate must be in \(0, 1\], got 1.1"),
    ({"tsp_rate": math.nan}, ValueError, "tsp_rate must be in"),
    ({"criterion": "latest"}, ValueError, "criterion must be one of argmin, earliest, got 'latest"),
    ({"tolerance": 0.0}, ValueError, "tolerance must be above 0 and finite, got 0.0"),
    ({"tolerance": -1.0}, ValueError, "tolerance must be above 0"),
    ({"tolerance": math.nan}, ValueError, "tolerance must be above 0"),
    ({"tolerance": math.inf}, ValueError, "tolerance must be above 0 and finite"),
    ({"tolerance": "0.1"}, TypeError, "tolerance must be a number"),
    ({"window_size": 0}, ValueError, "window_size must be at least 1"),
    ({"kernel_size": 4}, ValueError, "kernel_size must be odd"),
]


@pytest.mark.parametrize(("arguments", "error", "said"), BAD)
def test_bad_input_before_anything_is_computed(
    arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    model = model_of("llama")
    with counted(model) as calls, pytest.raises(error, match=said):
        select_tsp_layer(model, **{"calibration_inputs": [tokens(0, 40)], **arguments})
    assert not calls


def test_models_that_will_not_do() -> None:
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=VOCAB_SIZE))
    with pytest.raises(UnsupportedModelError, match="layers and a norm after them"):
        select_tsp_layer(other, [tokens(0, 40)])
    with pytest.raises(UnsupportedModelError, match="layers and a norm after them, .* got str"):
        select_tsp_layer("llama", [tokens(0, 40)])  # type: ignore[arg-type]
    training = tiny_model("llama", seed=3).train()
    with pytest.raises(ValueError, match=r"evaluation mode.*model\.eval"):
        select_tsp_layer(training, [tokens(0, 40)])


def test_numbers_that_are_none() -> None:
    model = tiny_model("llama", seed=3)
    with torch.no_grad():
        model.get_decoder().norm.weight.fill_(math.nan)
    with pytest.raises(ValueError, match=r"finite .* for calibration_inputs\[1\]"):
        select_tsp_layer(model, [tokens(0, 30), tokens(0, 40)])  # the longest comes first
    with torch.no_grad():
        model.get_decoder().norm.weight.zero_()
    with pytest.raises(ValueError, match="other than 0"):
        select_tsp_layer(model, [tokens(0, 40)])


def test_layers_with_tensors_of_their_own_are_refused() -> None:
    """Of an argument that is not known it is not known either how to cut it."""
    model = tiny_model("llama", seed=3)
    layer = model.get_decoder().layers[2]

    def add(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "biases": torch.zeros(1, 40)}

    handle = layer.register_forward_pre_hook(add, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="LlamaDecoderLayer is called with biases"):
        select_tsp_layer(model, [tokens(0, 40)])
    handle.remove()
    assert hooks_of(model) == 0
    assert select_tsp_layer(model, [tokens(0, 40)]).layer in (0, 1)  # and is usable again


def test_more_after_the_norm_is_refused() -> None:
    model = tiny_model("llama", seed=3)

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = 2 * output.last_hidden_state
        return output

    handle = model.get_decoder().register_forward_hook(double)
    with pytest.raises(UnsupportedModelError, match="LlamaModel does more after its layers"):
        select_tsp_layer(model, [tokens(0, 40)])
    handle.remove()


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("llama", seed=3)
    ids = tokens(0, 40)
    before = model(ids[None]).logits
    select_tsp_layer(model, [ids])
    assert hooks_of(model) == 0
    assert torch.equal(model(ids[None]).logits, before)
    assert all(parameter.requires_grad for parameter in model.parameters())

    def fail(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.get_decoder().layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        select_tsp_layer(model, [ids])
    handle.remove()
    assert hooks_of(model) == 0


def test_a_decoder_without_its_head() -> None:
    model = model_of("mistral")
    ids = [tokens(0, 40)]
    decoder = model.get_decoder()
    assert measure_tsp_distances(decoder, ids) == measure_tsp_distances(model, ids)


def test_progress_is_told() -> None:
    told = []
    inputs = [tokens(0, 30), tokens(0, 40)]
    measure_tsp_distances(model_of("llama"), inputs, progress=lambda *each: told.append(each))
    assert told == [("calibration", 0, 2), ("calibration", 1, 2), ("calibration", 2, 2)]
