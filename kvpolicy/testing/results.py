"""Checks a part's results against the properties it declares."""

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.attention import group_mean
from kvpolicy.context import LayerContext
from kvpolicy.declarations import declares
from kvpolicy.host_counts import known_counts
from kvpolicy.interfaces import KVSelector, Scorer
from kvpolicy.layer_inputs import DecodingInputs
from kvpolicy.testing.declared import require
from kvpolicy.testing.strategies import cut

# A difference of summation order over up to 40 queries of magnitude 1 stays far below this.
TOLERANCE = 1e-4


def check_scored(component: Scorer, context: LayerContext, saliency: Tensor) -> None:
    """Check a scorer's saliency against what the scorer's properties declare."""
    if declares(component, "accumulates"):
        require(
            component.num_queries is None and component.state_size > 0,
            "a scorer that declares accumulates must read all queries (num_queries of None) and "
            f"keep a state, got num_queries={component.num_queries} and "
            f"state_size={component.state_size}",
        )
        if context.new_len > 1:
            found, _ = component.update(_second_part(component, context))
            require(
                _near(found, saliency, context),
                "a scorer that declares accumulates must give the same saliency for queries in "
                "two parts as for all queries at once",
            )


def check_kept(component: KVSelector, context: LayerContext, kept: Tensor) -> None:
    """Check a selector's kept indices against what the selector's properties declare."""
    if declares(component, "keeps_all"):
        same = torch.equal((kept >= 0).sum(dim=-1), context.valid.sum(dim=-1))
        require(same, "a selector that declares keeps_all must keep every token")


def check_kept_counts(
    component: KVSelector, context: LayerContext, saliency: Tensor, kept: Tensor
) -> None:
    """Check that a selector keeps as many tokens of a layer as its ``kept_counts`` says."""
    held = context.valid.sum(dim=-1)
    if not bool((held == held[:, :1]).all()):  # unknown if heads hold different numbers
        return
    told = attrs.evolve(context, held_len=tuple(held[:, 0].tolist()))
    require(
        torch.equal(component.select(saliency, told), kept),
        "select must keep the same tokens whether held_len is known or not",
    )
    counts: object = known_counts(component, told)
    if counts is None:
        return
    ints = isinstance(counts, tuple) and all(type(each) is int for each in counts)
    require(ints, f"kept_counts must return a tuple of ints or None, got {counts!r}")
    found = (kept >= 0).sum(dim=-1).tolist()
    assert isinstance(counts, tuple)
    require(
        found == [[count] * context.kv_heads for count in counts],
        "kept_counts must return how many tokens select keeps of each row in every head, got "
        f"{counts}, but select keeps {found}",
    )


def _near(found: Tensor, expected: Tensor, context: LayerContext) -> bool:
    one, other = (group_mean(each, context.kv_heads)[context.valid] for each in (found, expected))
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def _second_part(component: Scorer, context: LayerContext) -> LayerContext:
    """Return a layer with only its later queries, and the scorer's state after the earlier ones."""
    count = context.new_len // 2
    queries, new = context.query_len - count, context.new_len - count
    earlier = cut(
        context, slots=slice(context.key_len - count), queries=slice(queries), new=slice(new)
    )
    _, state = component.update(attrs.evolve(earlier, held_len=None))
    later = cut(context, queries=slice(queries, None), new=slice(new, None))
    return attrs.evolve(later, decoding=DecodingInputs(pad(state, (0, 0, 0, count))))
