"""Members of `LayerContext` that are in groups now, or private, under their earlier names."""

import inspect
from typing import Any

import attrs
import pytest
import torch

from kvpolicy import LayerContext
from kvpolicy.heads import Heads
from kvpolicy.host_counts import held_counts
from kvpolicy.kinds import TokenKind
from kvpolicy.layer_inputs import AttentionSettings, DecodingInputs, LayerInputs
from kvpolicy.renamed import Moved
from kvpolicy.rotary import PlainRotary

EARLIER: dict[str, tuple[str, Any]] = {
    "scaling": ("attention", 0.5),
    "softcap": ("attention", 30.0),
    "sinks": ("attention", torch.arange(6.0)),
    "heads": ("layer", Heads()),
    "rotary": ("layer", PlainRotary(8)),
    "output_weight": ("layer", torch.ones(6, 8, 3)),
    "history": ("layer", (torch.ones(1, 2, 5),)),
    "state": ("decoding", torch.ones(1, 2, 5, 1)),
    "query_positions": ("decoding", torch.arange(5)[None]),
}
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
    public = {
        name
        for name, member in members
        if not name.startswith("_") and not isinstance(member, Moved)
    }
    assert public == PUBLIC


@pytest.mark.parametrize("name", EARLIER)
def test_reading_what_is_in_a_group(name: str) -> None:
    group, value = EARLIER[name]
    groups = {"attention": AttentionSettings, "layer": LayerInputs, "decoding": DecodingInputs}
    given = {"scaling": 0.5, name: value} if group == "attention" else {name: value}
    shown = context(**{group: groups[group](**given)})
    message = rf"^LayerContext\.{name} is deprecated, use {group}\.{name}$"
    with pytest.warns(DeprecationWarning, match=message) as told:
        assert getattr(shown, name) is value
    assert told[0].filename == __file__


@pytest.mark.parametrize("name", EARLIER)
def test_giving_what_is_in_a_group(name: str) -> None:
    """To the constructor, and to `attrs.evolve`, which keeps the rest of the group."""
    group, value = EARLIER[name]
    needed = {"scaling": 0.5} if name != "scaling" else {}
    with pytest.warns(DeprecationWarning, match=r"^\w+= of LayerContext is deprecated") as told:
        made = LayerContext(**arguments(), **needed, **{name: value})
    said = {str(each.message) for each in told}
    kind = type(getattr(made, group)).__name__
    assert f"{name}= of LayerContext is deprecated, use {group}={kind}({name}=...)" in said
    assert {each.filename for each in told} == {__file__}
    assert getattr(getattr(made, group), name) is value
    assert made.attention.scaling == 0.5
    before = context(
        attention=AttentionSettings(0.5, 20.0, torch.zeros(6)),
        layer=LayerInputs(Heads(), PlainRotary(4), torch.zeros(6, 8, 1), (torch.zeros(1, 2, 5),)),
        decoding=DecodingInputs(torch.zeros(1, 2, 5, 3), torch.zeros(1, 5, dtype=torch.int64)),
    )
    with pytest.warns(DeprecationWarning, match=rf"^{name}= of LayerContext is deprecated"):
        after = attrs.evolve(before, **{name: value})
    for each, (of_group, _) in EARLIER.items():
        was = getattr(getattr(before, of_group), each)
        assert getattr(getattr(after, of_group), each) is (value if each == name else was)


def test_giving_by_position_what_could_be() -> None:
    """In the order of the earlier signature, behind the eight that still can be."""
    kinds = torch.full((1, 2, 5), TokenKind.IMAGE, dtype=torch.int8)
    late: tuple[Any, ...] = (0.25, Heads(), 30.0, None, kinds)
    with pytest.warns(
        DeprecationWarning, match=r"^scaling= of LayerContext is dep.*use att"
    ) as told:
        made = LayerContext(*arguments().values(), *late[:1])  # type: ignore[misc, call-arg]
    assert [each.filename for each in told] == [__file__]
    assert attrs.astuple(made.attention) == (0.25, None, None)
    with pytest.warns(DeprecationWarning, match="is deprecated, use") as told:
        made = LayerContext(*arguments().values(), *late)  # type: ignore[misc, call-arg]
    assert attrs.astuple(made.attention) == (0.25, 30.0, None)
    assert made.is_kind(TokenKind.IMAGE).all()
    assert "giving kinds= of LayerContext by position is deprecated, use the name" in {
        str(each.message) for each in told
    }
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((0.25,), {"scaling": 0.25}),
        ((0.25,) + (None,) * 12, {}),
    ]
    for more, named in wrong:
        with pytest.raises(TypeError, match="positional arguments but|unexpected keyword"):
            LayerContext(*arguments().values(), *more, **named)


def test_a_context_without_scaling() -> None:
    with pytest.raises(TypeError, match="attention"):
        LayerContext(**arguments())  # type: ignore[call-arg]
    with (
        pytest.warns(DeprecationWarning, match="softcap="),
        pytest.raises(TypeError, match="scaling"),
    ):
        LayerContext(**arguments(), softcap=3.0)  # type: ignore[call-arg]


def test_what_only_the_library_needs() -> None:
    stored = (torch.ones(1, 1, 5, 4), torch.ones(1, 1, 5, 2))
    kinds = torch.full((1, 2, 5), TokenKind.IMAGE, dtype=torch.int8)
    shown = context(kinds=kinds, stored=stored, held_len=(5,))
    assert held_counts(shown) == (5,)
    with pytest.warns(DeprecationWarning, match=r"use kvpolicy\.host_counts\.held_counts\(context"):
        assert shown.held_len == (5,)
    with pytest.warns(DeprecationWarning, match=r"LayerContext\.unpadded is deprecated"):
        assert shown.unpadded
    with pytest.warns(DeprecationWarning, match="use is_kind"):
        assert shown.kinds is kinds
    with pytest.warns(DeprecationWarning, match="since only the library itself needs it"):
        assert shown.stored is stored
    with pytest.warns(DeprecationWarning, match=r"LayerContext\.showing is deprecated, since"):
        assert shown.showing(2).query_len == 2
    with pytest.warns(DeprecationWarning, match=r"LayerContext\.outlined is deprecated, since"):
        assert shown.outlined().keys.shape == (1, 2, 5, 0)
    with pytest.warns(DeprecationWarning, match=r"LayerContext\.for_selector is deprecated, since"):
        assert shown.for_selector().kv_heads == 1
    with pytest.warns(DeprecationWarning, match=r"LayerContext\.with_no_more is deprecated, since"):
        again = shown.with_no_more(history_layers=0, rotary=False, output_weight=False)
    assert again.layer.history == ()


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
