"""What hybrids say under policies: dense attention, and recurrences over what reaches them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import FastKV, FullContext, GemFilter, SnapKV
from tests.integrations.hybrids.models import (
    BEGIN_ANEW,
    BY_COLUMNS,
    FAMILIES,
    KINDS,
    OWN_CACHE,
    TOLERANCE,
    apart,
    generate,
    hybrid,
    hybrid_options,
    states_of,
    tokens,
)
from tests.integrations.model.builds.catalogue import Build, builds
from tests.integrations.model.builds.dense import decoder_layers, dense_logits
from tests.integrations.support.alone import read_two_turns
from tests.integrations.support.conversation import left_padded

ROWS = [tokens(0, 47), tokens(1, 31)]
TWO_TURNS: dict[str, CachePolicy] = {
    "snapkv": SnapKV(retention_rate=0.4, window_size=4),
    "fastkv": FastKV(tsp_rate=0.25, retention_rate=0.2, window_size=4),
}


@pytest.mark.parametrize("name", [*FAMILIES, *BEGIN_ANEW])
def test_keeping_everything_is_the_models_own_cache(name: str) -> None:
    model, (ids, mask) = hybrid(name), left_padded(ROWS)
    own: Any = None if name in OWN_CACHE else DynamicCache(config=model.config)
    cache = PolicyCache(FullContext())
    want_tokens, want = generate(model, own, ids, mask)
    found_tokens, found = generate(model, cache, ids, mask)
    assert torch.equal(found_tokens, want_tokens)
    assert apart(found, want) < 1e-5
    if own is None:
        return
    held = [
        each
        for layer in own.layers
        for part in ("conv_states", "recurrent_states")
        for each in getattr(layer, part, {}).values()
        if each is not None
    ]
    for one, other in zip(states_of(cache), held, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def cut_in_two(model: PreTrainedModel, ids: Tensor, layer: int, passed: Tensor) -> Tensor:
    """The last layer's output where the layers after one read some tokens of a row alone.

    Args:
        model: A decoder; of its layers' masks only those of sliding windows are needed.
        ids: `[1, len]`.
        layer: The last that reads all.
        passed: `[count]`, the tokens that the others read.
    """
    layers, given, left = decoder_layers(model), {}, {}

    def enters(index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            given[index] = args[1:], kwargs

        return hook

    def leaves(module: nn.Module, args: Any, output: Any) -> None:
        left[0] = output

    handles = [
        each.register_forward_pre_hook(enters(index), with_kwargs=True)
        for index, each in enumerate(layers)
    ]
    handles.append(layers[layer].register_forward_hook(leaves))
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        if isinstance(value, dict):
            return {name: cut(each) for name, each in value.items()}
        if isinstance(value, Tensor) and value.shape[2:] == (ids.shape[1], ids.shape[1]):
            return value[..., passed, :][..., passed]  # a mask
        if not isinstance(value, Tensor) or ids.shape[1] not in value.shape[1:]:
            return value
        return value.index_select(list(value.shape).index(ids.shape[1], 1), passed)

    output = cut(left[0])
    for index in range(layer + 1, len(layers)):
        args, kwargs = map(cut, given[index])
        hidden, *beside = output if isinstance(output, tuple) else (output,)
        carried = [each for each in beside if isinstance(each, Tensor) and each.ndim == 3]
        output = layers[index](hidden, *(carried or args), **kwargs)
    whole: Tensor = output[0] if isinstance(output, tuple) else output
    return whole


@pytest.mark.parametrize(
    "name", [name for name in (*FAMILIES, *BEGIN_ANEW) if name not in BY_COLUMNS]
)
def test_after_a_drop_later_layers_read_what_went_on(name: str) -> None:
    """Against the decoder cut in two: its upper half never sees a dropped token."""
    model, ids = hybrid(name), torch.tensor(ROWS[:1])
    cache, last = PolicyCache(FastKV(tsp_rate=0.4, retention_rate=0.3, window_size=4)), []
    with torch.no_grad(), cache.attached(model):
        handle = decoder_layers(model)[-1].register_forward_hook(
            lambda module, args, output: last.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
        model(ids, cache=cache)
        handle.remove()
    ((layer, passed),) = cache.propagated.items()
    assert len(passed[0]) == 18
    want = cut_in_two(model, ids, layer, passed[0])
    everything = cut_in_two(model, ids, layer, torch.arange(47))
    assert last[0].shape == want.shape
    assert apart(last[0], want) < TOLERANCE
    assert apart(everything[:, -1], want[:, -1]) > 1e-2


@pytest.mark.parametrize("policy", TWO_TURNS)
@pytest.mark.parametrize("name", FAMILIES)
def test_two_turns(name: str, policy: str) -> None:
    cache = read_two_turns(hybrid(name), TWO_TURNS[policy], [40], [21])
    assert bool(cache.propagated) is (policy == "fastkv")


@pytest.mark.parametrize("name", [name for name in (*KINDS, *BEGIN_ANEW) if name not in BY_COLUMNS])
def test_a_restart_leaves_nothing_of_its_first_pass(name: str) -> None:
    """The answer is that to the chosen tokens alone."""
    model, cache = hybrid(name), PolicyCache(GemFilter(retention_rate=0.4))
    ids, mask = left_padded(ROWS)
    said, found = generate(model, cache, ids, mask)
    (chosen,) = cache.propagated.values()
    for row, ids_of_row in enumerate(ROWS):
        alone = [ids_of_row[place] for place in chosen[row].tolist() if place >= 0]
        assert len(alone) == int(0.4 * len(ids_of_row))
        answer = said[row, 47:-1].tolist()
        want = dense_logits(model, alone + answer, len(alone))[len(alone) - 1 :]
        assert apart(found[row], want) < TOLERANCE


@pytest.mark.parametrize("name", [name for name in KINDS if name not in OWN_CACHE])
def test_attentions_are_those_of_the_layers_that_attend(name: str) -> None:
    """By the columns of the input, as from the model's own cache, also in a turn after padding."""
    eager = Build(name, builds()[name].model_type, hybrid_options(name)).model(
        attn_implementation="eager"
    )
    ids, mask = left_padded(ROWS)
    cache, own = PolicyCache(FullContext()), DynamicCache(config=eager.config)
    told = []
    with torch.no_grad(), cache.attached(eager):
        for store in (own, cache):
            eager(
                ids,
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                **{CACHE: store},
            )
            longer = torch.cat([mask, mask[:, -3:]], dim=1)
            output = eager(
                ids[:, -3:],
                attention_mask=longer,
                position_ids=(longer.cumsum(1) - 1)[:, -3:],
                **{CACHE: store},
                output_attentions=True,
            )
            told.append([each for each in output.attentions if each is not None])
    assert len(told[0]) == len(told[1]) == sum(layer.attends for layer in cache.layers)
    for one, other in zip(*told, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
