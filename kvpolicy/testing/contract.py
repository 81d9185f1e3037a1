"""Checks properties that any choice of tokens must have, and those that a part declares.

Part of `kvpolicy.testing`.
"""

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.attention import group_mean
from kvpolicy.budgets import Budget
from kvpolicy.context import LayerContext
from kvpolicy.declarations import declares
from kvpolicy.host_counts import known_counts
from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
from kvpolicy.layer_inputs import AttentionSettings, DecodingInputs, LayerInputs
from kvpolicy.testing.declared import (
    check_acting_layers,
    check_passes,
    check_placed,
    check_rates,
    require,
)
from kvpolicy.testing.strategies import cut


def snapshot(context: LayerContext, *more: Tensor) -> list[object]:
    """Copy a layer context's tensors, to check later that a policy part did not modify them."""

    def copied(value: object) -> object:
        if isinstance(value, tuple):
            return [copied(each) for each in value]
        if isinstance(value, (AttentionSettings, LayerInputs, DecodingInputs)):
            return [copied(each) for each in attrs.asdict(value, recurse=False).values()]
        return (value.shape, value.flatten().tolist()) if isinstance(value, Tensor) else value

    fields = attrs.asdict(context, recurse=False).values()
    return [copied(value) for value in (*fields, *more)]


def check_choice(
    indices: Tensor,
    *,
    valid: Tensor,
    protected: Tensor,
    saliency: Tensor | None,
    budget: Budget | None,
    seen_len: int,
    exact: bool = True,
) -> None:
    """Check one row's and head's chosen indices ``[count]`` against its ``[length]`` tokens.

    A saliency of None does not decide, a budget of None is not known. Unless ``exact``, more than
    the budget may be chosen.
    """
    require(indices.dtype == torch.int64, f"indices must be int64, got {indices.dtype}")
    all_indices: list[int] = indices.tolist()
    chosen = [index for index in all_indices if index != -1]
    require(
        all_indices[len(all_indices) - len(chosen) :] == chosen,
        f"-1 may come only before all other indices, got {all_indices}",
    )
    require(chosen == sorted(set(chosen)), f"indices must be ascending and unique, got {chosen}")
    require(
        all(0 <= index < len(valid) and bool(valid[index]) for index in chosen),
        f"indices must be in [0, {len(valid)}) and not those of padding, got {chosen}",
    )
    fixed = protected.nonzero().flatten().tolist()
    require(set(fixed) <= set(chosen), f"protected tokens {fixed} must be among {chosen}")
    if budget is not None:
        available = int(valid.sum())
        expected = budget.count(seen_len=seen_len, available=available, protected=len(fixed))
        require(
            len(chosen) == expected or (len(chosen) > expected and not exact),
            f"{'exactly' if exact else 'at least'} {expected} tokens must be kept, got "
            f"{len(chosen)}",
        )
    if saliency is not None:
        kept = [float(saliency[index]) for index in chosen if index not in fixed]
        dropped = set(valid.nonzero().flatten().tolist()) - set(chosen)
        worst = min(kept, default=float("inf"))
        best = max((float(saliency[index]) for index in dropped), default=float("-inf"))
        require(
            best <= worst,
            f"no dropped token may outscore a kept unprotected one, but {best} > {worst}",
        )


def decides_alone(part: KVSelector | PropagationPolicy) -> bool:
    """True if a part reads only a head's own saliency.

    It reads no history, rotary embedding or output weights, and does not choose for all layers.
    """
    more = part.history_layers > 0 or part.needs_rotary or part.needs_output_weight
    if isinstance(part, KVSelector):
        more = more or part.decides_together
    return part.needs_saliency and not more


def says_how_it_ranks(part: PropagationPolicy) -> bool:
    """True if the tokens that go on are those ranked highest by the policy's `ranking`.

    A policy that needs more inputs and does not override `ranking` may use any other order.
    """
    own = type(part).ranking is not PropagationPolicy.ranking
    return decides_alone(part) or (part.needs_saliency and own)


def check_protected(
    part: KVSelector | PropagationPolicy, protected: Tensor, positions: Tensor
) -> None:
    """Check that one row's and head's ``protected`` marks the tokens that the part declares."""
    held = [index for index, position in enumerate(positions.tolist()) if position >= 0]
    tail = set(held[max(len(held) - part.protected_tail, 0) :])
    first = {index for index in held if int(positions[index]) < part.protected_first}
    fixed = set(protected.nonzero().flatten().tolist())
    require(
        tail | first <= fixed <= set(held),
        f"protected must hold the last protected_tail={part.protected_tail} tokens and those at "
        f"positions below protected_first={part.protected_first}, {sorted(tail | first)}, and no "
        f"padding, got {sorted(fixed)}",
    )


def check_layers(component: PropagationPolicy, num_layers: int) -> None:
    """Check the acting layers and the rates that a propagation policy declares for a model."""
    acting = component.acting_layers(num_layers)
    check_acting_layers(acting, num_layers)
    rates = component.layer_rates(num_layers, context_len=1000)
    check_rates("layer_rates", rates, num_layers)
    check_passes(component, num_layers)
    if acting:
        check_placed(component, num_layers)
    if component.budget is None:
        return
    passed = component.budget.count(seen_len=1000, available=1000, protected=0)
    last = max(acting, default=num_layers)  # earlier ones may have larger budgets
    require(
        passed == 1000 or all(rate < 1 for rate in rates[last + 1 :]),
        f"layer_rates must be below 1 after layer {last}, where tokens are dropped, got {rates}",
    )


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
