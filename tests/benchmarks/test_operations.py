"""Counted operations: against those that torch counts, on paper, and as the paper has them."""

import re
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from benchmarks.operations import allowed_prefill, layers_of, main, operations
from kvpolicy import CachePolicy
from kvpolicy.evaluation import shape_of
from kvpolicy.evaluation.estimate.shapes import load_config
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.policies import FastKV, FullContext, GemFilter, KVzip, SnapKV
from tests.families import FAMILIES
from tests.reference import random_tokens, tiny_model

HALF = FastKV(tsp_layer=0, tsp_rate=0.5, retention_rate=0.25)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=3, attn_implementation="eager")


def weights_of(model: Any) -> list[int]:
    """Weights of each layer's matrices."""
    return [
        sum(each.numel() for each in layer.parameters() if each.ndim == 2)
        for layer in model.model.layers
    ]


def pair_width(model: PreTrainedModel) -> int:
    """Multiplications of a pair of query and key, with keys and values as wide as queries."""
    config = model.config
    return 2 * config.num_attention_heads * config.head_dim


def test_full_context_and_a_drop_on_paper(model: PreTrainedModel) -> None:
    each, *others = weights_of(model)
    config, width, count = model.config, pair_width(model), len(others)
    assert set(others) == {each}
    full, found = (operations(policy, model, 40) for policy in (None, HALF))
    assert full == operations(FullContext(), model, 40)
    assert full.linear == 2 * 40 * (count + 1) * each
    assert full.attention == (count + 1) * 40**2 * width  # half of two products, 2 operations each
    assert full.head == found.head == 2 * config.hidden_size * config.vocab_size
    assert found.linear == 2 * (40 + 20 * count) * each
    assert found.attention == (40**2 + count * 20**2) * width
    assert allowed_prefill(HALF, model, 40) == full.total / found.total


def test_a_restart_on_paper(model: PreTrainedModel) -> None:
    """Layer 0 whole, of layer 1 queries, keys and values; then all layers over 10 tokens."""
    each, width, attention = (
        weights_of(model)[0],
        pair_width(model),
        model.model.layers[1].self_attn,
    )
    made = sum(getattr(attention, name).weight.numel() for name in ("q_proj", "k_proj", "v_proj"))
    count = len(weights_of(model))
    found = operations(GemFilter(filter_layer=1, retention_rate=0.25), model, 40)
    assert found.linear == 2 * 40 * each + 2 * 40 * made + 2 * count * 10 * each
    assert found.attention == width * (40**2 + count * 10**2)


def test_a_second_reading_is_counted(model: PreTrainedModel) -> None:
    assert operations(KVzip(0.25), model, 400).linear >= 1.9 * operations(None, model, 400).linear


def test_a_state_on_paper() -> None:
    """Two operations to write each of its numbers, and two to read it."""
    model = FAMILIES["qwen3_next"].build(seed=4)
    shape = shape_of(model.config)
    held = sum(layer.state_elements for layer in shape.layers)
    assert held > 0
    assert operations(None, model, 40).states == 4 * 40 * held
    recurrent = [work.pair_width == 0 for work in layers_of(model, shape)]
    assert recurrent == [bool(layer.state_elements) for layer in shape.layers]


def test_windows_are_refused() -> None:
    model = FAMILIES["gpt_oss"].build(seed=4)
    with pytest.raises(ValueError, match="layers must see the whole prompt, got a window of 16"):
        operations(None, model, 40)


@pytest.mark.parametrize(
    "policy",
    [FullContext(), SnapKV(0.2), FastKV(tsp_layer=1, tsp_rate=0.4), GemFilter(filter_layer=2)],
    ids=lambda policy: type(policy).__name__,
)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_torch_counts_as_much_in_linear_layers(
    monkeypatch: pytest.MonkeyPatch, family: Any, policy: CachePolicy
) -> None:
    """Of the prefill where every layer runs for all of the tokens that reach it.

    Matrices of weights are `mm`, whatever scores is `bmm`. Layers that run for the tokens that go
    on compute less than is counted.
    """
    model = tiny_model(family, seed=3, attn_implementation="eager")
    prompt = torch.tensor([random_tokens(5, 200)])

    def linear_flops() -> int:
        cache = PolicyCache(policy)
        with torch.no_grad(), cache.attached(model), FlopCounterMode(display=False) as counter:
            model(prompt, cache=cache, logits_to_keep=1)
        return int(counter.get_flop_counts()["Global"][torch.ops.aten.mm])

    found = operations(policy, model, 200)
    assert linear_flops() < found.linear + found.head
    monkeypatch.setattr(PassRun, "_narrows", lambda *_: False)
    assert linear_flops() == found.linear + found.head


def test_torch_counts_twice_as_much_in_eager_attention(model: PreTrainedModel) -> None:
    """It computes the square of which causal attention needs half."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.tensor([random_tokens(5, 200)]))
    products = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    assert products == 2 * operations(None, model, 200).attention


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-8b", 8.03), ("deepseek-v3", 37.55), ("qwen3.6-35b-a3b", 3.46)],
)
def test_models_have_the_active_parameters_of_their_cards(name: str, billions: float) -> None:
    from transformers import AutoModelForCausalLM

    config = load_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = sum(work.weights for work in layers_of(model, shape_of(config)))
    vocabulary = 2 * config.vocab_size * config.hidden_size
    assert (layers + vocabulary) / 1e9 == pytest.approx(billions, abs=0.01)


def test_speedups_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [8192, 32768, 131072]
    main([part for length in lengths for part in ("--context", str(length))])
    said = re.findall(r"^(\d+): (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [int(length) for length, _ in said] == lengths
    assert [round(float(allowed), 2) for _, allowed in said] == [1.70, 1.76, 1.84]
