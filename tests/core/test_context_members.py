"""The members of a `LayerContext`, and what its constructor takes."""

import inspect
from typing import Any

import attrs
import pytest
import torch

from kvpolicy import LayerContext
from kvpolicy.host_counts import held_counts
from kvpolicy.layer_inputs import AttentionSettings, DecodingInputs, LayerInputs
from kvpolicy.rotary import PlainRotary

PUBLIC = {
    *("layer_idx", "num_layers", "queries", "keys", "values", "positions", "valid", "seen_len"),
    *("batch", "kv_heads", "query_heads", "key_len", "query_len", "new_len"),
    *("new_valid", "query_valid", "query_places"),
    *("is_tail", "is_first", "is_kind", "is_new_tail", "is_new_first", "is_new_kind"),
    *("attention", "layer", "decoding"),
}


def arguments() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "layer_idx": 1,
        "num_layers": 2,
        "queries": torch.randn(1, 6, 5, 8, generator=generator),
        "keys": torch.randn(1, 2, 5, 8, generator=generator),
        "values": torch.randn(1, 2, 5, 8, generator=generator),
        "positions": torch.arange(5).expand(1, 2, -1),
        "new_valid": torch.ones(1, 5, dtype=torch.bool),
        "seen_len": (5,),
    }


def context(**more: Any) -> LayerContext:
    return LayerContext(**arguments(), **{"attention": AttentionSettings(0.5), **more})


def test_the_members_of_a_context() -> None:
    """No more than these: what is added here is promised for all later versions."""
    members = inspect.getmembers_static(context())
    assert {name for name, _ in members if not name.startswith("_")} == PUBLIC


def test_a_context_has_eight_arguments_by_position() -> None:
    made = LayerContext(*arguments().values(), attention=AttentionSettings(0.25))
    assert attrs.astuple(made.attention) == (0.25, None, None)
    with pytest.raises(TypeError, match="positional"):
        LayerContext(*arguments().values(), AttentionSettings(0.25))  # type: ignore[misc]


def test_a_context_needs_its_attention() -> None:
    with pytest.raises(TypeError, match="attention"):
        LayerContext(**arguments())  # type: ignore[call-arg]


def test_held_counts_are_those_given() -> None:
    assert held_counts(context(held_len=(5,))) == (5,)


def test_a_context_that_shows_less_shows_nothing_else() -> None:
    """Copies are made without the constructor: every field is as the constructor sets it."""
    layer = LayerInputs(rotary=PlainRotary(8), history=(torch.ones(1, 2, 5),) * 3)
    places = DecodingInputs(torch.ones(1, 2, 5, 1), torch.arange(5)[None])
    whole = context(layer=layer, decoding=places, held_len=(5,))
    whole._counts[1] = (2,)
    shown = whole._showing(2)._with_no_more(history_layers=2, rotary=False, output_weight=False)
    made = attrs.evolve(
        whole,
        queries=whole.queries[:, :, 3:],
        layer=LayerInputs(history=layer.history[1:]),
        decoding=DecodingInputs(places.state, torch.tensor([[3, 4]])),
    )
    assert whole.query_len == 5
    for field in attrs.fields(LayerContext):
        own, expected = getattr(shown, field.name), getattr(made, field.name)
        if field.name in ("layer", "decoding"):
            own, expected = (attrs.astuple(each, recurse=False) for each in (own, expected))
        if isinstance(own, torch.Tensor):
            assert torch.equal(own, expected)
        elif field.name == "decoding":
            assert torch.equal(own[1], expected[1])
            assert own[0] is expected[0]
        else:
            assert own == expected
