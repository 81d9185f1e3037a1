"""What attaching a cache costs, counted, and that it sees a model as it is at that moment."""

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.overhead import SIZES, Calls
from kvpolicy.errors import NotAttachedError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.model import attachment
from kvpolicy.integrations.transformers.model.modules import modules_of, path_to
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import FastKV
from tests.integrations.support.reading import Interrupted, marks_on, read
from tests.integrations.support.versions import OLD
from tests.integrations.test_robustness import failing
from tests.reference import random_tokens, tiny_model

# The most Python calls for attaching and detaching: for each layer, of which 33 make Transformers'
# own cache, and for the model.
CALLS = 90, 380
POLICY = FastKV(tsp_rate=0.4, retention_rate=0.3)


@pytest.fixture(autouse=True)
def _without_coverage() -> Iterator[None]:
    before = sys.getprofile()
    yield
    sys.setprofile(before)


def calls_of(layers: int) -> int:
    model = tiny_model("llama", seed=1, num_layers=layers)
    for _ in range(2):  # what is found once for a class is not counted
        cache = PolicyCache(POLICY)
        with Calls() as calls, cache.attached(model):
            pass
    return calls.count


@pytest.mark.skipif(OLD, reason="other releases call other functions themselves")
def test_python_calls() -> None:
    few, many = map(calls_of, SIZES)
    each = (many - few) / (SIZES[1] - SIZES[0])
    assert each <= CALLS[0]
    assert few - SIZES[0] * each <= CALLS[1]


def test_the_tree_is_walked_as_torch_walks_it() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(shared, nn.ReLU()), shared)
    model.add_module("none", None)
    model[1].add_module("around", model)  # also a circle
    assert modules_of(model) == list(model.modules())
    for name, module in model.named_modules():
        path = path_to(model, module)
        assert [*path][-1] == name
        assert list(path.values()) == [model.get_submodule(each) for each in path]
        assert path[name] is module
    assert path_to(model, nn.ReLU()) == {}
    assert path_to(shared, shared) == {"": shared}


def answer(model: Any, prompt: Tensor) -> tuple[Tensor, list[Tensor]]:
    cache, logits = read(model, POLICY, prompt, logits_to_keep=1)
    return logits, [layer.positions for layer in cache.layers]


def other_layers(model: Any) -> None:
    model.model.layers = nn.ModuleList(reversed(model.model.layers[:4]))
    model.config.num_hidden_layers = 4
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index


def other_attention(model: Any) -> None:
    attention = copy.deepcopy(model.model.layers[2].self_attn)
    attention.q_proj.weight.data.mul_(3)
    model.model.layers[2].self_attn = attention


def other_linear(model: Any) -> None:
    linear = model.model.layers[1].self_attn.k_proj
    model.model.layers[1].self_attn.k_proj = nn.Sequential(linear, nn.Tanh())


def with_hook(model: Any) -> None:
    model.model.layers[3].register_forward_hook(_halved)


def _halved(module: nn.Module, args: Any, output: Any) -> Any:
    return output / 2


def eager(model: Any) -> None:
    model.set_attn_implementation("eager")


def moved(model: Any) -> None:
    model.double()


def with_lora(model: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    names = ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=names)
    peft.inject_adapter_in_model(config, model)


CHANGES = (other_layers, other_attention, other_linear, with_hook, eager, moved, with_lora)


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_may_change_between_two_calls(change: Callable[[Any], None]) -> None:
    """The next answer is that of an equal model that no cache was ever attached to."""
    model, prompt = tiny_model("llama", seed=1, num_layers=6), torch.tensor([random_tokens(2, 60)])
    first = answer(model, prompt)
    change(model)
    before = marks_on(model)
    logits, positions = answer(model, prompt)
    assert marks_on(model) == before
    want = answer(copy.deepcopy(model), prompt)
    assert torch.equal(logits, want[0])
    assert all(map(torch.equal, positions, want[1]))
    assert change is eager or not torch.equal(logits, first[0])


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_an_adapter_is_removed_again() -> None:
    peft = pytest.importorskip("peft")
    model, prompt = tiny_model("llama", seed=1, num_layers=6), torch.tensor([random_tokens(2, 60)])
    want = answer(model, prompt)[0]
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
    wrapped = peft.get_peft_model(model, config)
    assert not torch.equal(answer(wrapped, prompt)[0], want)
    assert torch.equal(answer(wrapped.unload(), prompt)[0], want)


# When another library replaces the layers' `forward`, and when it puts it back.
ORDERS = [("before", "between"), ("between", "after"), ("before", "after"), ("between", "between")]


@pytest.mark.parametrize(("begun", "ended"), ORDERS)
def test_others_may_replace_the_forward_of_layers(begun: str, ended: str) -> None:
    """As accelerate does; added and removed in any order, and then the model is as it was."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, prompt = tiny_model("llama", seed=1, num_layers=6), torch.tensor([random_tokens(2, 60)])
    want, _ = answer(model, prompt)
    layers, called = model.get_decoder().layers, list[nn.Module]()

    class Noting(hooks.ModelHook):  # type: ignore[misc]
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            called.append(module)
            return args, kwargs

    def change(moment: str) -> None:
        for layer in layers if moment == begun else ():
            hooks.add_hook_to_module(layer, Noting())
        for layer in layers if moment == ended else ():
            hooks.remove_hook_from_module(layer)

    change("before")
    cache = PolicyCache(POLICY)
    with cache.attached(model), torch.no_grad():
        logits = model(prompt, cache=cache, logits_to_keep=1).logits
        count = len(called)
        change("between")
        model(prompt[:, :1], cache=cache)
    assert (count > 0) is (begun == "before")
    assert (len(called) > count) is (ended == "after")
    change("after")
    assert torch.equal(logits, want)
    assert all(layer.forward.__func__ is type(layer).forward for layer in layers)
    assert not any({"_old_forward", "_hf_hook"} & vars(layer).keys() for layer in layers)


def test_a_layer_called_by_hand_after_an_interruption_is_refused() -> None:
    model, prompt = tiny_model("llama", seed=1), torch.tensor([random_tokens(2, 60)])
    before, layer, cache = marks_on(model), model.get_decoder().layers[1], PolicyCache(POLICY)
    hidden = torch.zeros(1, 3, model.config.hidden_size)
    rotary = model.get_decoder().rotary_emb(hidden, torch.arange(3)[None])
    with cache.attached(model), torch.no_grad():
        with failing(model, "layers.2.mlp", 1, Interrupted), pytest.raises(Interrupted):
            model(prompt, cache=cache)
        cache.reset()
        with pytest.raises(NotAttachedError, match="call the model inside"):
            layer(hidden, position_embeddings=rotary, **{CACHE: cache})
        model(prompt, cache=cache)
    assert marks_on(model) == before


def test_a_cache_that_leaves_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may end its forward while a layer looks for the cache that calls it."""
    model, ids = tiny_model("llama", seed=1, num_layers=2), torch.tensor([random_tokens(0, 30)])
    leaving, staying = PolicyCache(POLICY), PolicyCache(POLICY)
    first, own = leaving._reader, attachment.carries
    with torch.no_grad(), leaving.attached(model), staying.attached(model):
        assert first.attachment is not None
        gone = first.attachment

        def carries(cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            found = own(cache, args, kwargs)
            if cache is leaving and "position_embeddings" in kwargs:  # in a layer
                gone._leave_layers()
            return found

        expected = model(ids, cache=staying, logits_to_keep=1).logits
        staying.reset()
        gone._enter_layers()
        monkeypatch.setattr(attachment, "carries", carries)
        assert torch.equal(model(ids, cache=staying, logits_to_keep=1).logits, expected)
        assert 0 < staying.layers[1].kept_len < 30


def test_a_copy_of_an_attached_model_does_not_know_the_cache() -> None:
    model, prompt = tiny_model("llama", seed=1), torch.tensor([random_tokens(2, 60)])
    cache = PolicyCache(POLICY)
    with torch.no_grad(), cache.attached(model):
        model(prompt, cache=cache)
        other, seen = copy.deepcopy(model), cache.get_seq_length()
        with pytest.raises(NotAttachedError, match="cache must be attached"):
            other(prompt, **{CACHE: cache})
        assert cache.get_seq_length() == seen
        assert torch.equal(other(prompt).logits, model(prompt).logits)
