"""`LayerContext`: what is shown of a layer whose heads share what is stored."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy, LayerContext, Scorer
from kvpolicy.attention import causal_attention_peaks, causal_attention_sums, query_key_products
from kvpolicy.errors import ShapeError
from kvpolicy.kinds import TokenKind
from kvpolicy.layer_inputs import AttentionSettings, DecodingInputs, LayerInputs
from kvpolicy.policies import AdaptiveHeadSelector, GQAGroupSelector, PassAllPropagation
from kvpolicy.testing import check_scorer

BATCH, HEADS, LENGTH, STORED = 2, 3, 5, 7


@attrs.frozen
class Given(Scorer):
    """The saliency it is given."""

    saliency: Any = attrs.field(eq=False)

    def score(self, context: LayerContext) -> Tensor:
        assert context.kv_heads == HEADS  # a scorer is shown all of them
        return torch.tensor(self.saliency)


def shared(**changes: Any) -> LayerContext:
    """A layer of two rows, the second of three tokens, whose heads share what is stored."""
    positions = torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]])[:, None].expand(-1, HEADS, -1)
    context = LayerContext(
        layer_idx=0,
        num_layers=1,
        queries=torch.randn(BATCH, HEADS, 2, 11),
        keys=torch.randn(BATCH, HEADS, LENGTH, 11),
        values=torch.randn(BATCH, HEADS, LENGTH, 13),
        positions=positions,
        new_valid=positions[:, 0] >= 0,
        seen_len=(5, 3),
        attention=AttentionSettings(1.0, sinks=torch.zeros(HEADS)),
        kinds=torch.full((BATCH, HEADS, LENGTH), TokenKind.IMAGE, dtype=torch.int8),
        stored=(torch.randn(BATCH, 1, LENGTH, STORED), torch.randn(BATCH, 1, LENGTH, 2)),
    )
    return attrs.evolve(context, **changes)


def test_a_selector_chooses_among_what_is_stored() -> None:
    context = shared()
    assert context._stored is not None
    shown = context._for_selector()
    assert torch.equal(shown.keys, context._stored[0])
    assert torch.equal(shown.values, context._stored[1])
    assert (shown.kv_heads, shown.query_heads, shown.query_len) == (1, HEADS, 0)
    assert torch.equal(shown.positions, context.positions[:, :1])
    assert shown.is_kind(TokenKind.IMAGE).tolist() == shown.valid.tolist()
    assert shown._stored is None
    assert shown._for_selector() is shown


def test_several_heads_that_are_stored_stand_side_by_side() -> None:
    keys, values = torch.randn(BATCH, 2, LENGTH, 3), torch.randn(BATCH, 2, LENGTH, 5)
    shown = shared(stored=(keys, values))._for_selector()
    assert torch.equal(shown.keys[:, 0], torch.cat([keys[:, 0], keys[:, 1]], dim=-1))
    assert torch.equal(shown.values[:, 0], torch.cat([values[:, 0], values[:, 1]], dim=-1))


@pytest.mark.parametrize("kind", [GQAGroupSelector, AdaptiveHeadSelector])
def test_the_mean_of_all_heads_decides(kind: Any) -> None:
    """Row 0: token 1 is second in every head, and first on average."""
    saliency = [
        [[9.0, 8.0, 0.0, 0.0, 0.0], [0.0, 8.0, 9.0, 0.0, 0.0], [0.0, 8.0, 0.0, 9.0, 0.0]],
        [[9.0, 9.0, 1.0, 0.0, 0.0], [9.0, 9.0, 0.0, 2.0, 0.0], [9.0, 9.0, 0.0, 0.0, 0.0]],
    ]
    selector = kind(retention_tokens=2, window_size=1)
    policy = CachePolicy(Given(saliency), selector, PassAllPropagation())
    assert policy.decide(shared()).kept.tolist() == [[[1, 4]], [[3, 4]]]


@attrs.frozen
class Undeclared(Scorer):
    """Looks at queries in some way, and declares none."""

    look: Callable[[LayerContext], Tensor] = attrs.field(eq=False)

    def score(self, context: LayerContext) -> Tensor:
        return self.look(context)


LOOKS = {
    "the last one": lambda context: query_key_products(context.queries, context.keys)[:, :, -1],
    # Sums and maxima over none would be zeros, and no error.
    "their sum": lambda context: (context.queries.sum(dim=2, keepdim=True) * context.keys).sum(-1),
    "attention": causal_attention_sums,
    "peaks": causal_attention_peaks,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_queries_that_were_not_asked_for(look: Callable[[LayerContext], Tensor]) -> None:
    """Every way to look at them says what to declare: in a policy, and in the contract."""
    scorer = Undeclared(look)
    policy = CachePolicy(scorer, GQAGroupSelector(0.5), PassAllPropagation())
    message = "a scorer must declare num_queries to read queries, .* at layer 0"
    with pytest.raises(ShapeError, match=message):
        policy.decide(shared(stored=None))
    with pytest.raises(ShapeError, match="must declare num_queries"):
        check_scorer(scorer)


def test_a_layer_without_queries_goes_on_without_them() -> None:
    """What makes one context of another, and asks for lengths, needs no query."""
    context = shared()._showing(0)
    assert (context.query_len, context.query_heads) == (0, HEADS)
    assert context.query_valid.shape == context.query_places.shape == (BATCH, 0)
    for other in (attrs.evolve(context, layer_idx=0), context._outlined(), context._for_selector()):
        assert (other.query_len, other.query_heads) == (0, HEADS)
        with pytest.raises(ShapeError, match="num_queries"):
            _ = other.queries
    assert shared()._showing(1).queries.shape == (BATCH, HEADS, 1, 11)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"keys": None}, TypeError, "keys must be a Tensor, got None"),
        ({"queries": [1]}, TypeError, "queries must be a Tensor, got \\[1\\]"),
        ({"attention": AttentionSettings(1.0, sinks=[1.0])}, TypeError, "sinks must be a Tensor"),
        ({"stored": torch.ones(1)}, TypeError, "stored must be a tuple"),
        (
            {"stored": (torch.ones(BATCH, 1, 4, STORED), torch.ones(BATCH, 1, 4, 2))},
            ShapeError,
            r"stored must be two tensors .* got \[2, 1, 4, 7\]",
        ),
        ({"seen_len": 5}, TypeError, "seen_len must be a tuple, got 5"),
        ({"held_len": [5, 3]}, TypeError, "held_len must be a tuple"),
        ({"layer": LayerInputs(history=None)}, TypeError, "history must be a tuple, got None"),
        ({"layer": LayerInputs(heads=None)}, TypeError, "heads must be a Heads, got None"),
        ({"layer": LayerInputs(output_weight=1)}, TypeError, "output_weight must be a Tensor"),
        ({"layer": LayerInputs(history=([],))}, TypeError, "history must be a Tensor, got \\[\\]"),
        ({"decoding": DecodingInputs(state=3)}, TypeError, "state must be a Tensor, got 3"),
        ({"decoding": DecodingInputs(None, 3)}, TypeError, "query_positions must be a Tensor"),
        ({"decoding": None}, TypeError, "decoding must be a DecodingInputs, got None"),
        ({"layer": 0}, TypeError, "layer must be a LayerInputs, got 0"),
        ({"attention": 1.0}, TypeError, "attention must be a AttentionSettings, got 1.0"),
        ({"positions": torch.zeros(BATCH, HEADS, LENGTH)}, TypeError, "must be torch.int64, got"),
        ({"new_valid": torch.ones(BATCH, LENGTH)}, TypeError, "new_valid must be torch.bool, got"),
        ({"layer_idx": "0"}, TypeError, "layer_idx must be an int, got '0'"),
        ({"layer_idx": 1}, ValueError, "layer_idx must be at most 0, got 1"),
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1, got 0"),
        (
            {"keys": torch.ones(BATCH, LENGTH, 11)},
            ShapeError,
            r"keys must be \[batch, kv_heads, key_len, head_dim\]",
        ),
        (
            {"queries": torch.ones(BATCH, HEADS, 2, 4)},
            ShapeError,
            "queries and keys must agree in batch and head_dim",
        ),
        (
            {"queries": torch.ones(BATCH, 4, 2, 11)},
            ShapeError,
            "query_heads must be a multiple of kv_heads",
        ),
        ({"queries": torch.ones(BATCH, HEADS, 6, 11)}, ShapeError, "must hold, got 6, 5 and 5"),
        ({"values": torch.ones(BATCH, HEADS, 4, 13)}, ShapeError, "values must be"),
        ({"positions": torch.ones(BATCH, LENGTH)}, ShapeError, r"= \[2, 3, 5\], got \[2, 5\]"),
        (
            {"new_valid": torch.ones(3, LENGTH)},
            ShapeError,
            r"new_valid must be \[batch, new_len\] with batch=2",
        ),
        (
            {"new_valid": torch.ones(BATCH, 6)},
            ShapeError,
            "query_len <= new_len <= key_len must hold",
        ),
        ({"seen_len": (3,)}, ShapeError, "seen_len must have one entry per row"),
        (
            {"attention": AttentionSettings(1.0, sinks=torch.ones(2))},
            ShapeError,
            r"sinks must be \[query_heads\] = \[3\], got \[2\]",
        ),
        (
            {"kinds": torch.ones(BATCH, HEADS, 4, dtype=torch.int8)},
            ShapeError,
            r"kinds must be \[batch, kv_heads, key_len\] = \[2, 3, 5\]",
        ),
        (
            {"layer": LayerInputs(history=(torch.ones(BATCH, HEADS, 4),))},
            ShapeError,
            "history must hold tensors",
        ),
        (
            {"layer": LayerInputs(output_weight=torch.ones(2, 13, 7))},
            ShapeError,
            "output_weight must be",
        ),
        (
            {"keys": torch.ones(0, HEADS, LENGTH, 11), "queries": torch.ones(0, HEADS, 2, 11)},
            ShapeError,
            "keys must have at least one row and one head, got \\[0, 3, 5, 11\\]",
        ),
    ],
    ids=str,
)
def test_what_a_layer_is_made_of(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shared(**changes)
