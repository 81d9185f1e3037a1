"""The analyses: against dense attention, plain loops and runs of the model, and by hand."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation import (
    OutputDistances,
    Overlap,
    attention_recall,
    output_distances,
    topk_overlap,
    window_attention,
)
from kvpolicy.evaluation.analysis.attention import _WindowAttention, top_tokens
from kvpolicy.evaluation.analysis.prefill import _Show
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import KeepAllSelector, TokenSelectivePropagation, WindowMaxPoolScorer
from kvpolicy.testing import check_scorer, check_selector
from tests.reference import FAMILIES, VOCAB_SIZE, random_tokens, tiny_model
from tests.reference.decoder import project
from tests.reference.models import Family
from tests.reference.selection import highest

PROMPT = random_tokens(11, 59)
WINDOW = 5
NUM_LAYERS = 4
LAST = NUM_LAYERS - 1
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}


@cache
def model_of(family: Family = "llama", attn_implementation: str = "sdpa") -> PreTrainedModel:
    return tiny_model(
        family, seed=7, num_layers=NUM_LAYERS, attn_implementation=attn_implementation
    )


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[Counter[tuple[int, int]]]:
    """Calls of decoder layers, by layer and number of tokens."""
    calls: Counter[tuple[int, int]] = Counter()

    def counter(index: int) -> Any:
        def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            calls[index, args[0].shape[1]] += 1

        return count

    layers = cast(Any, model).get_decoder().layers
    handles = [layer.register_forward_pre_hook(counter(i)) for i, layer in enumerate(layers)]
    yield calls
    for handle in handles:
        handle.remove()


def hooks_of(model: PreTrainedModel) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


# Where attention goes.


@cache
def dense_shares(family: Family = "llama", window: int = WINDOW) -> list[list[float]]:
    """Per layer, each token's share of the window's attention: the model's own, in full."""
    model = cast(Any, model_of(family, "eager"))
    with torch.no_grad():
        output = model(torch.tensor([PROMPT]), output_attentions=True, use_cache=False)
    return [each[0, :, -window:].double().mean(dim=(0, 1)).tolist() for each in output.attentions]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("window", [1, WINDOW, len(PROMPT) - 1])
def test_window_attention_is_that_of_the_model(family: Family, window: int) -> None:
    shares = torch.stack([*window_attention(model_of(family), PROMPT, window).values()])
    expected = torch.tensor(dense_shares(family, window), dtype=torch.float64)
    torch.testing.assert_close(shares, expected, atol=1e-6, rtol=1e-4)
    assert shares.std(dim=1).min() > 0.005  # peaked: a wrong layer or window would show


def test_layers_of_sliding_windows_are_left_out() -> None:
    """Of Gemma 3, only every sixth layer sees the whole context."""
    config = Gemma3TextConfig(num_hidden_layers=6, sliding_window=16, head_dim=16, **SIZES)
    model = Gemma3ForCausalLM(config).eval()
    shares = window_attention(model, PROMPT, WINDOW)
    assert list(shares) == [5]
    assert topk_overlap(shares, 3) == Overlap(3, (5,), ((1.0,),))
    assert output_distances(model, [PROMPT]).layers == (5,)
    with pytest.raises(
        ValueError, match=r"max_layer must be in \[5, 5\], from the first layer that"
    ):
        output_distances(model, [PROMPT], max_layer=2)


@pytest.mark.parametrize("k", [1, 7, 30, len(PROMPT)])
def test_overlap_against_sets(k: int) -> None:
    attention = window_attention(model_of(), torch.tensor([PROMPT]), WINDOW)
    pairs = topk_overlap(attention, k).pairs
    named = [set(highest(shares, k)) for shares in dense_shares()]
    for one, row in zip(named, pairs, strict=True):
        assert list(row) == pytest.approx([len(one & other) / k for other in named])
    if k == 7:
        assert 0 < pairs[0][1] < 1  # or else any tokens would do


def test_overlap_and_recall_by_hand() -> None:
    """Layer 0 names {0, 1}, layer 1 {1, 3}, layer 2 {2, 3}; each row adds up to 10."""
    rows = [[4.0, 3.0, 2.0, 1.0], [2.0, 3.0, 1.0, 4.0], [1.0, 2.0, 4.0, 3.0]]
    attention = {layer: torch.tensor(row) for layer, row in zip((0, 1, 5), rows, strict=True)}
    overlap = topk_overlap(attention, 2)
    assert overlap == Overlap(2, (0, 1, 5), ((1.0, 0.5, 0.0), (0.5, 1.0, 0.5), (0.0, 0.5, 1.0)))
    found = attention_recall(attention, [1, 2, 4])
    expected = {1: (0.4, 0.4, 0.4), 2: (0.7, 0.7, 0.7), 4: (1.0, 1.0, 1.0)}
    assert found == {k: pytest.approx(held) for k, held in expected.items()}
    four = ((1.0, 0.5, 0.2, 0.1), (0.5, 1.0, 0.4, 0.3), (0.2, 0.4, 1.0, 0.6), (0.1, 0.3, 0.6, 1.0))
    assert Overlap(2, (1, 3, 5, 7), four).by_distance() == {
        "all layers": pytest.approx((1.0, 0.5, 0.25, 0.1)),
        "layers 1-3": (1.0, 0.5),
        "layers 5-7": (1.0, 0.6),
    }
    assert top_tokens(torch.ones(1, 99), 3).tolist() == [[0, 1, 2]]  # of equals the earlier


def test_parts_keep_their_contracts() -> None:
    check_scorer(_WindowAttention(5))
    check_selector(_Show(lambda saliency, context: None))


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for each in output if isinstance(output, tuple | list) else [output]:
            if isinstance(each, Tensor):
                self.bytes = max(self.bytes, each.numel() * each.element_size())
        return output


def test_no_matrix_of_queries_times_keys() -> None:
    """At 8192 tokens one head's matrix has 256 MiB in float32; nothing is a tenth of it."""
    model = tiny_model("llama", seed=1, num_layers=2, query_heads=4, hidden_size=32)
    prompt = random_tokens(3, 8192)
    with Largest() as largest:
        window_attention(model, prompt)
        output_distances(model, [prompt], max_layer=0)
    assert 1 << 20 < largest.bytes < 4 * 8192**2 // 10


# What dropping tokens costs.


@torch.no_grad()
def last_state(model: PreTrainedModel, ids: list[int], layer: int | None = None) -> Tensor:
    """The last token's final hidden state; run as the model runs, with a drop after a layer."""
    decoder, tokens = cast(Any, model).get_decoder(), torch.tensor([ids])
    if layer is None:
        return cast(Tensor, decoder(tokens).last_hidden_state[0, -1].double())
    scorer = WindowMaxPoolScorer(4, kernel_size=3)
    drop = TokenSelectivePropagation(tsp_layer=layer, tsp_rate=0.3, window_size=4, protect=2)
    cache = PolicyCache(CachePolicy(scorer, KeepAllSelector(), drop))
    with cache.attached(model):
        output = decoder(tokens, cache=cache)
    return cast(Tensor, output.last_hidden_state[0, -1].double())


@torch.no_grad()
@pytest.mark.parametrize("tsp_rate", [0.2, 0.5])
def test_restarts_by_hand(tsp_rate: float) -> None:
    """The last token, and the highest of the products summed over heads, averaged over 5."""
    model, count = model_of(), int(len(PROMPT) * tsp_rate)
    found = output_distances(model, [PROMPT], tsp_rate, max_layer=LAST, window_size=WINDOW)
    assert found.layers == (0, 1, 2, 3)
    full = last_state(model, PROMPT)
    assert found.norms == pytest.approx([float(full.norm())], rel=1e-4)
    hidden = cast(Any, model)(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    for layer in found.layers:
        queries, held = project(model, layer, hidden[layer][0], list(range(len(PROMPT))))
        summed = torch.zeros(len(PROMPT) + 4)
        for head, query in enumerate(queries):
            entries = held[head * len(held) // len(queries)]
            summed[2:-2] += torch.stack([entry.key for entry in entries]) @ query[-1]
        pooled = [float(summed[index : index + 5].mean()) for index in range(len(PROMPT) - 1)]
        chosen = [*sorted(highest(pooled, count - 1)), len(PROMPT) - 1]
        again = last_state(model, [PROMPT[index] for index in chosen])
        expected = float((again - full).norm() / full.norm())
        assert expected > 0.05
        assert found.restarted[layer] == pytest.approx([expected], rel=1e-4)


DROP: dict[str, Any] = {"window_size": 4, "kernel_size": 3, "protect": 2, "restart": False}


def as_run_for_each_layer(model: PreTrainedModel) -> None:
    found = output_distances(model, [PROMPT], 0.3, max_layer=LAST, **DROP)
    full = last_state(model, PROMPT)
    for layer in range(LAST):
        expected = float((last_state(model, PROMPT, layer) - full).norm() / full.norm())
        assert expected > 0.05  # the drop matters
        assert found.propagated[layer] == pytest.approx([expected], rel=1e-4)
    assert found.propagated[LAST] == pytest.approx([0.0], abs=1e-6)  # no layer comes after it


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_as_running_the_model_for_each_layer(family: Family, implementation: str) -> None:
    as_run_for_each_layer(model_of(family, implementation))


def test_models_whose_layers_cannot_be_shared_are_run_for_each_layer() -> None:
    """One has no norm; one does more after it; one gives a layer a tensor of its own."""
    sizes = {"n_layer": NUM_LAYERS, "n_embd": 48, "n_head": 6, "vocab_size": VOCAB_SIZE}
    sizes |= {"bos_token_id": 1, "eos_token_id": 1}
    as_run_for_each_layer(GPT2LMHeadModel(GPT2Config(initializer_range=0.3, **sizes)).eval())

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = 2 * output.last_hidden_state
        return output

    def add(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "biases": torch.zeros(1)}

    model = tiny_model("llama", seed=7, num_layers=NUM_LAYERS)
    decoder = cast(Any, model).get_decoder()
    for register in (
        lambda: decoder.register_forward_hook(double),
        lambda: decoder.layers[2].register_forward_pre_hook(add, with_kwargs=True),
    ):
        handle = register()
        as_run_for_each_layer(model)
        with counted(model) as calls:
            output_distances(model, [PROMPT], 0.3, max_layer=1, **DROP)
        assert sum(calls[0, length] for length in (59, 17)) >= 3  # the first layer, each time
        handle.remove()


def test_cost_is_one_full_pass_and_the_later_layers_of_each() -> None:
    """The layers before a drop are run once for all; a restart reads what is chosen alone."""
    model, inputs = model_of("qwen3"), [random_tokens(0, 60), random_tokens(1, 40)]
    expected = Counter({(layer, n): 1 for layer in range(NUM_LAYERS) for n in (60, 40)})
    for dropped_at in range(3):
        for layer in range(dropped_at + 1, NUM_LAYERS):
            expected[layer, 15] += 1  # int(0.25 * 60)
            expected[layer, 10] += 1
    with counted(model) as calls:
        output_distances(model, inputs, 0.25, max_layer=2, restart=False)
    assert calls == expected
    with counted(model) as calls:
        output_distances(model, inputs, 0.25, max_layer=2)
    for layer in range(NUM_LAYERS):
        expected[layer, 60] += 1
        expected[layer, 40] += 1
        expected[layer, 15] += 3
        expected[layer, 10] += 3
    assert calls == expected


def test_nothing_dropped_is_no_distance_and_costs_one_pass() -> None:
    model = model_of()
    with counted(model) as calls:
        found = output_distances(model, [PROMPT], 1.0, max_layer=LAST, restart=False)
    assert calls == Counter({(layer, 59): 1 for layer in range(NUM_LAYERS)})
    assert found.propagated == ((0.0,),) * NUM_LAYERS
    assert found.choose() == 0  # the earliest of equals


def test_several_prompts_are_each_of_them() -> None:
    """In any order and of several lengths, as ``[len]`` or ``[1, len]``; means and worst."""
    inputs: list[Any] = [PROMPT[:37], torch.tensor([PROMPT]), torch.tensor(PROMPT[:23])]
    told: list[tuple[str, int, int]] = []
    together = output_distances(model_of(), inputs, 0.3, progress=lambda *each: told.append(each))
    assert told == [("output distances", done, 3) for done in range(4)]
    alone = [output_distances(model_of(), [each], 0.3) for each in inputs]
    assert together.lengths == (37, 59, 23)
    assert together.norms == tuple(each.norms[0] for each in alone)
    for at in range(2):
        assert together.propagated[at] == tuple(each.propagated[at][0] for each in alone)
        assert together.restarted[at] == tuple(each.restarted[at][0] for each in alone)
        singles, row = [each.by_layer[at] for each in alone], together.by_layer[at]
        assert row.squared == pytest.approx(sum(each.squared for each in singles) / 3)
        assert row.normalised == pytest.approx(sum(each.normalised for each in singles) / 3)
        assert row.worst == max(each.worst for each in singles)
        assert singles[0].normalised == singles[0].worst


def test_defaults_and_compute_rates() -> None:
    """By hand, 4 layers at rate 0.2: layer 0 computes 1 + 3 * 0.2 of 4 layers, layer 1 2.4."""
    found = output_distances(model_of(), [PROMPT], restart=False)
    assert found.layers == (0, 1)  # 4 // 2 - 1
    assert [each.compute_rate for each in found.by_layer] == pytest.approx([1.6 / 4, 2.4 / 4])


def test_the_criteria_by_hand() -> None:
    """They read different numbers: argmin the squared distance, earliest the normalised one."""
    far = ((0.7, 0.1), (0.2, 0.2), (0.3, 0.1), (0.3, 0.1), (0.02, 0.2))
    distances = OutputDistances(0.2, 9, (0, 1, 2, 4, 5), (50, 60), (1.0, 9.0), far)
    squared, normalised, _ = zip(*(each[2:] for each in distances.by_layer), strict=True)
    assert normalised == pytest.approx((0.25, 0.04, 0.05, 0.05, 0.0202))
    assert squared == pytest.approx((0.65, 1.64, 0.45, 0.45, 1.6202))
    assert distances.choose() == 2  # (0.09 + 0.81) / 2; the earliest of equals
    assert distances.choose("earliest", 0.06) == 1
    assert distances.choose("earliest", 0.03) == 5
    assert distances.choose("earliest", 0.3) == 0
    with pytest.raises(
        ValueError, match=r"up to max_layer 5, but the closest, 5, is at 0.0202, got 0.01; raise"
    ):
        distances.choose("earliest")


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("llama", seed=3)
    before = model(torch.tensor([PROMPT])).logits
    output_distances(model, [PROMPT])
    assert hooks_of(model) == 0
    assert torch.equal(model(torch.tensor([PROMPT])).logits, before)

    def fail(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    handle = cast(Any, model).get_decoder().layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        output_distances(model, [PROMPT])
    handle.remove()
    assert hooks_of(model) == 0


# Bad input.

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"inputs": []}, ValueError, "inputs must hold at least one prompt, got none"),
    ({"inputs": torch.tensor(PROMPT)}, TypeError, "sequence of prompts' token ids, got Tensor"),
    ({"inputs": PROMPT}, ValueError, r"prompt 0 must be \[prompt_len\] or .* got shape \[\]"),
    ({"inputs": [PROMPT, [PROMPT] * 2]}, ValueError, r"prompt 1 must .* got shape \[2, 59\]"),
    ({"inputs": ["text"]}, TypeError, "prompt 0 must be the token ids of one prompt"),
    ({"inputs": [[0.5] * 20]}, TypeError, "prompt 0 must be ints, got torch.float32"),
    ({"inputs": [PROMPT, PROMPT[:8]]}, ValueError, "longer than window_size, 8 tokens, got 8"),
    ({"inputs": [[5] * 20 + [VOCAB_SIZE]]}, ValueError, r"ids in \[0, 96\], got 97"),
    ({"inputs": [[5] * 20 + [-1]]}, ValueError, r"ids in \[0, 96\], got -1"),
    ({"max_layer": 4}, ValueError, r"max_layer must be in \[0, 3\], .*, got 4"),
    ({"max_layer": -1}, ValueError, "max_layer must be at least 0"),
    ({"max_layer": 1.0}, TypeError, "max_layer must be an int"),
    ({"tsp_rate": 0.0}, ValueError, r"tsp_rate must be in \(0, 1\], got 0.0"),
    ({"tsp_rate": "x"}, TypeError, "tsp_rate must be a number"),
    ({"window_size": 0}, ValueError, "window_size must be at least 1"),
    ({"kernel_size": 4}, ValueError, "kernel_size must be odd"),
    ({"model": None}, TypeError, "model must be a Module, got None"),
]


@pytest.mark.parametrize(("arguments", "error", "said"), BAD)
def test_bad_input_before_anything_is_computed(
    arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with counted(model_of()) as calls, pytest.raises(error, match=said):
        output_distances(**{"model": model_of(), "inputs": [PROMPT], **arguments})
    assert not calls


def test_bad_numbers_of_tokens() -> None:
    attention = {0: torch.ones(59)}
    with pytest.raises(ValueError, match="k must be at most the prompt's 59 tokens, got 60"):
        topk_overlap(attention, 60)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        attention_recall(attention, [1, 0])
    with pytest.raises(ValueError, match="longer than window_size, 59 tokens, got 59"):
        window_attention(model_of(), PROMPT, 59)


def test_bad_criteria() -> None:
    distances = OutputDistances(0.2, 4, (0,), (50,), (1.0,), ((0.5,),))
    with pytest.raises(ValueError, match="criterion must be one of argmin, earliest, got 'latest'"):
        distances.choose("latest")
    for tolerance in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="tolerance must be above 0 and finite"):
            distances.choose("argmin", tolerance)
    with pytest.raises(TypeError, match="tolerance must be a number"):
        distances.choose("earliest", cast(Any, "0.1"))


def test_models_that_will_not_do() -> None:
    windows = MistralConfig(num_hidden_layers=2, sliding_window=16, **SIZES)
    with pytest.raises(UnsupportedModelError, match="layers that see all: none"):
        output_distances(MistralForCausalLM(windows).eval(), [PROMPT])
    training = tiny_model("llama", seed=3).train()
    with pytest.raises(ValueError, match=r"evaluation mode.*model\.eval"):
        output_distances(training, [PROMPT])
    model = tiny_model("llama", seed=3)
    for weight in (math.nan, 0.0):
        nn.init.constant_(cast(Any, model).get_decoder().norm.weight, weight)
        with pytest.raises(
            ValueError, match="finite final hidden states other than 0, .* prompt 1"
        ):
            output_distances(model, [PROMPT[:30], PROMPT])  # the longest comes first
