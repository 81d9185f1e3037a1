"""Policies under the modes of torch: compiled models, gradients, autocast, inference mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from tests.integrations.state.test_leftovers import read_and_generate, read_by_hand
from tests.integrations.support.reading import marks_on
from tests.integrations.test_robustness import POLICIES, batch_of, continued, generate, two_turns
from tests.reference import Act, dense_masked_logits, random_tokens, tiny_model, visible_after

# Compiled models.


def backend(graph: Any, inputs: Any) -> Any:
    return graph.forward


def forward_of(module: Any) -> None:
    module.forward = torch.compile(module.forward, backend=backend)


def in_place(module: Any) -> None:
    module.compile(backend=backend)


def put_in(parent: Any, name: str) -> None:
    setattr(parent, name, torch.compile(getattr(parent, name), backend=backend))


# What is compiled of a tiny model, without ever running it.
COMPILED: dict[str, Callable[[Any], Any]] = {
    "torch.compile(model)": lambda model: torch.compile(model, backend=backend),
    "model.compile()": in_place,
    "model.forward": forward_of,
    "decoder.compile()": lambda model: in_place(model.model),
    "torch.compile(decoder)": lambda model: put_in(model, "model"),
    "decoder.forward": lambda model: forward_of(model.model),
    "layer.compile()": lambda model: in_place(model.model.layers[1]),
    "layer.forward": lambda model: forward_of(model.model.layers[1]),
    "torch.compile(layer)": lambda model: put_in(model.model.layers, "1"),
    "attention.compile()": lambda model: in_place(model.model.layers[1].self_attn),
}


@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_model_is_refused(how: str) -> None:
    cache, model = PolicyCache(POLICIES["fastkv"]), tiny_model("llama", seed=1)
    if (wrapped := COMPILED[how](model)) is not None:
        model = wrapped
    before = marks_on(model)
    with pytest.raises(UnsupportedModelError, match="must not be compiled"):
        read_by_hand(model, cache)
    assert marks_on(model) == before
    assert cache.get_seq_length() == 0
    if how != "torch.compile(model)":
        with pytest.raises(UnsupportedModelError, match="must not be compiled"):
            read_and_generate(model, cache)


def test_generate_of_a_compiled_model_runs_the_model_inside(model: PreTrainedModel) -> None:
    """`torch.compile(model).generate` is the generate of the model that was given to compile."""
    expected = generate(model, PolicyCache(POLICIES["fastkv"]), batch_of(30))
    wrapped = torch.compile(model, backend=backend)
    assert torch.equal(generate(wrapped, PolicyCache(POLICIES["fastkv"]), batch_of(30)), expected)


def test_a_part_that_no_hook_is_on_may_be_compiled() -> None:
    model = tiny_model("llama", seed=1)
    expected = generate(model, PolicyCache(POLICIES["fastkv"]), batch_of(30))
    for layer in model.model.layers:
        layer.mlp.compile(backend=backend)
    assert torch.equal(generate(model, PolicyCache(POLICIES["fastkv"]), batch_of(30)), expected)


# Gradients, and other modes of torch.


@pytest.mark.parametrize("name", ["full_context", "snapkv", "adakv", "fastkv", "gemfilter"])
def test_gradients_flow_through_what_is_kept(name: str) -> None:
    """Choices have no gradient; what was chosen has, from a decoded token back to the prompt."""
    model = tiny_model("llama", seed=1)
    embeds = model.get_input_embeddings()(batch_of(40)["inputs"]).detach().requires_grad_()
    cache = PolicyCache(POLICIES[name])
    with cache.attached(model):
        prompt = model(inputs_embeds=embeds, cache=cache).logits
        kept = {
            position
            for layer in cache.layers
            for head in layer.positions[0].tolist()
            for position in head
            if position >= 0
        }
        logits = model(torch.tensor([[7]]), cache=cache).logits
    assert prompt.requires_grad
    assert cache.layers[0].keys.requires_grad
    (gradient,) = torch.autograd.grad(logits[0, -1].sum(), embeds, retain_graph=True)
    touched = set(gradient[0].abs().sum(dim=1).nonzero().flatten().tolist())
    assert kept <= touched  # and what those tokens have attended to
    if name == "gemfilter":
        assert touched == kept  # nothing of a token that the second pass did not read
        assert len(kept) == 12
    prompt.sum().backward()
    unread = {"model.embed_tokens.weight"}  # the embeddings were given
    assert {name for name, each in model.named_parameters() if each.grad is None} == unread


@pytest.mark.parametrize("name", ["full_context", "streamingllm", "snapkv", "adakv", "fastkv"])
def test_gradients_are_those_of_dense_attention_under_a_mask(name: str) -> None:
    """The mask lets every layer see what it kept and all newer tokens; it has no gradient."""
    model = tiny_model("llama", seed=1)
    ids, length = random_tokens(0, 40), 40
    weight = model.get_input_embeddings().weight
    cache = PolicyCache(POLICIES[name])
    with cache.attached(model):
        model(torch.tensor([ids]), cache=cache)
        kept = [layer.positions[0].tolist() for layer in cache.layers]
        kept = [[[each for each in head if each >= 0] for head in layer] for layer in kept]
        logits = model(torch.tensor([[7]]), cache=cache).logits[0, -1]
    (gradient,) = torch.autograd.grad(logits.square().mean(), weight)
    reached, now = [], list(range(length))
    for layer in range(4):
        reached.append(now)
        now = cache.propagated[layer][0].tolist() if layer in cache.propagated else now
    visible = visible_after([Act(0, length, kept, reached)], query_heads=6, length=length + 1)
    # Unwrapped: the reference itself computes without gradients.
    dense = dense_masked_logits.__wrapped__(model, [*ids, 7], visible)[-1]
    torch.testing.assert_close(logits, dense, atol=1e-4, rtol=0)
    (expected,) = torch.autograd.grad(dense.square().mean(), weight)
    torch.testing.assert_close(gradient, expected, atol=1e-3 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("name", POLICIES)
def test_inference_mode_changes_nothing(model: PreTrainedModel, name: str) -> None:
    """Nor may a cache filled in it be of no use outside, or be unable to go on."""
    expected = list(two_turns(model, POLICIES[name]))
    with torch.inference_mode():
        assert list(two_turns(model, POLICIES[name])) == expected
    cache, given = PolicyCache(POLICIES[name]), batch_of(40, 23)
    with torch.inference_mode():
        said = generate(model, cache, given)
    assert said.tolist() == expected[0][0]
    assert (
        generate(model, cache, continued(said.clone(), given["attention_mask"], 6, 15)).tolist()
        == (expected[1][0])
    )


@pytest.mark.parametrize("name", POLICIES)
def test_autocast_keeps_as_many_and_in_the_caches_precision(
    model: PreTrainedModel, name: str
) -> None:
    plain, cast = PolicyCache(POLICIES[name]), PolicyCache(POLICIES[name])
    generate(model, plain, batch_of(40, 23), max_new_tokens=2)
    with torch.autocast("cpu", torch.bfloat16):
        generate(model, cast, batch_of(40, 23), max_new_tokens=2)
    for one, other in zip(plain.layers, cast.layers, strict=True):
        assert other.values.dtype == torch.bfloat16
        assert int((one.positions >= 0).sum()) == int((other.positions >= 0).sum())
    assert cast.propagated.keys() == plain.propagated.keys()
