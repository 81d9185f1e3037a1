"""Runs the property tests of a scorer, a selector or a propagation policy."""

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_kind
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
from kvpolicy.testing.contract import (
    check_choice,
    check_kept,
    check_kept_counts,
    check_layers,
    check_protected,
    check_scored,
    decides_alone,
    says_how_it_ranks,
    snapshot,
)
from kvpolicy.testing.declared import (
    check_propagation_declares,
    check_rates,
    check_scorer_declares,
    check_selector_declares,
    check_tensor,
    require,
)
from kvpolicy.testing.draws import Draws, run_examples
from kvpolicy.testing.shares import (
    check_kept_in_shares,
    check_passed_in_shares,
    check_scores_in_shares,
)
from kvpolicy.testing.strategies import draw_context, draw_saliency, row_alone
from kvpolicy.testing.together import check_alone, check_together

# A difference of summation order over up to 40 keys of magnitude 1 stays far below this.
TOLERANCE = 1e-5


def check_scorer(component: Scorer, *, shrink: bool = False) -> None:
    """Run property tests of the `Scorer` contract on a scorer.

    Args:
        component: The scorer.
        shrink: True searches for the smallest layer that breaks the contract, which may take a
            minute and needs hypothesis; False shows the first one found.

    Raises:
        TypeError: ``component`` is no `Scorer`.
        AssertionError: It breaks the contract; the message says how.
        ImportError: ``shrink`` is True, and hypothesis is not installed.
    """
    check_kind("component", component, Scorer)
    check_scorer_declares(component)

    def run(_draws: Draws, context: LayerContext) -> None:
        before = snapshot(context)
        saliency = component.score(context)
        require(snapshot(context) == before, "score must not modify the context")
        heads = {context.query_heads, context.kv_heads}
        require(isinstance(saliency, Tensor), f"saliency must be a tensor, got {saliency!r}")
        require(
            saliency.ndim == 3
            and saliency.shape[0] == context.batch
            and saliency.shape[1] in heads
            and saliency.shape[2] == context.key_len,
            "saliency must be [batch, query_heads or kv_heads, key_len] = "
            f"[{context.batch}, {heads}, {context.key_len}], got {list(saliency.shape)}",
        )
        require(saliency.dtype == torch.float32, f"saliency must be float32, not {saliency.dtype}")
        require(saliency.device == context.keys.device, "saliency must be on the keys' device")
        for row in range(context.batch):
            alone = row_alone(context, row)
            tokens = alone.valid[0].repeat_interleave(saliency.shape[1] // context.kv_heads, dim=0)
            here = saliency[row, :, context.key_len - alone.key_len :][tokens]
            require(bool(here.isfinite().all()), "saliency of tokens must be finite")
            again = component.score(context)[row, :, context.key_len - alone.key_len :][tokens]
            require(torch.equal(here, again), "score must be deterministic")
            difference = float((here - component.score(alone)[0][tokens]).abs().max())
            scale = max(float(here.abs().max()), 1.0)
            require(
                difference <= TOLERANCE * scale,
                f"a padded row must get the same saliency as without padding, row {row} differs "
                f"by {difference}",
            )
        check_scores_in_shares(component, context, saliency, TOLERANCE)
        _check_update(component, context, saliency)
        check_scored(component, context, saliency)

    wanted = component.num_queries
    run_examples(run, lambda draws: draw_context(draws, wanted, component), shrink=shrink)


def _check_update(component: Scorer, context: LayerContext, saliency: Tensor) -> None:
    """Check the saliency and the state that `Scorer.update` returns."""
    before = snapshot(context)
    updated, state = component.update(context)
    require(snapshot(context) == before, "update must not modify the context")
    shape = [context.batch, context.kv_heads, context.key_len, component.state_size]
    check_tensor("state [batch, kv_heads, key_len, state_size]", state, torch.float32, shape)
    require(bool(state[context.valid].isfinite().all()), "the state must be finite")
    same = component.state_size > 0 or torch.equal(updated, saliency)
    require(same, "update must return the saliency of score where state_size is 0")


def check_selector(
    component: KVSelector, larger: KVSelector | None = None, *, shrink: bool = False
) -> None:
    """Run property tests of the `KVSelector` contract on a selector.

    Args:
        component: The selector.
        larger: The same selector with a larger budget, to check that it only adds tokens. None for
            a selector with a `KVSelector.budget`, for which a longer context is used.
        shrink: True searches for the smallest layer that breaks the contract, which may take a
            minute and needs hypothesis; False shows the first one found.

    Raises:
        TypeError: One of them is no `KVSelector`.
        AssertionError: It breaks the contract; the message says how.
        ImportError: ``shrink`` is True, and hypothesis is not installed.
    """
    check_kind("component", component, KVSelector)
    if larger is not None:
        check_kind("component", larger, KVSelector)
    check_selector_declares(component)
    for num_layers in (1, 8, 32, 33):
        rates = component.kept_rates(num_layers, context_len=1000)
        check_rates("kept_rates", rates, num_layers)

    def run(draws: Draws, context: LayerContext) -> None:
        more, saliency = draws.integer(0, 60), draw_saliency(draws, context)
        before = snapshot(context, saliency)
        rows = [context.batch, context.kv_heads]
        protected = component.protected(context)
        name = "protected [batch, kv_heads, key_len]"
        check_tensor(name, protected, torch.bool, [*rows, context.key_len])
        kept = component.select(saliency, context)
        require(snapshot(context, saliency) == before, "select must not modify its arguments")
        check_tensor("kept [batch, kv_heads, kept_len]", kept, torch.int64, [*rows, None])
        longer = attrs.evolve(context, seen_len=tuple(n + more for n in context.seen_len))
        kept_of_more = (larger or component).select(
            saliency, longer if component.budget else context
        )
        for row in range(context.batch):
            for head in range(context.kv_heads):
                check_protected(component, protected[row, head], context.positions[row, head])
                check_choice(
                    kept[row, head],
                    valid=context.valid[row, head],
                    protected=protected[row, head],
                    saliency=saliency[row, head] if decides_alone(component) else None,
                    budget=component.budget,
                    seen_len=context.seen_len[row],
                )
                added = set(kept_of_more[row, head].tolist()) - {-1}
                lost = set(kept[row, head].tolist()) - {-1} - added
                require(not lost, f"a larger budget must only add tokens, but drops {lost}")
            alone = row_alone(context, row)
            start = context.key_len - alone.key_len
            own = component.select(saliency[row : row + 1, :, start:].clone(), alone)[0]
            own = torch.where(own < 0, own, own + start)
            here = kept[row, :, kept.shape[2] - own.shape[1] :]
            require(
                torch.equal(here, own) and bool((kept[row, :, : -own.shape[1]] == -1).all()),
                f"a padded row must keep the same tokens as without padding, row {row} keeps "
                f"{here.tolist()} instead of {own.tolist()}",
            )
        check_kept_in_shares(component, context, saliency, kept)
        check_kept_counts(component, context, saliency, kept)
        if component.decides_together:
            check_together(component, larger, context, draws)
        else:
            check_alone(component, context, saliency)
        if component.is_bounded:
            _check_bounded(component, context, saliency)
        if component.equal_counts:
            _check_equal_counts(context, protected, kept)
        check_kept(component, context, kept)

    run_examples(run, lambda draws: draw_context(draws, 0, component), shrink=shrink)


def _check_equal_counts(context: LayerContext, protected: Tensor, kept: Tensor) -> None:
    """Check that all heads keep equally many tokens of a row, if they hold equally many."""
    shown = torch.stack([context.valid.sum(dim=-1), protected.sum(dim=-1)])
    alike = (shown == shown[:, :, :1]).all(dim=0)  # as the first head
    counts = (kept >= 0).sum(dim=-1)
    require(
        bool(((counts == counts[:, :1]) | ~alike).all()),
        "a selector that declares equal_counts must keep equally many tokens in all heads of a "
        f"row, got {counts.tolist()}",
    )


def _check_bounded(component: KVSelector, context: LayerContext, saliency: Tensor) -> None:
    """Check that a bounded selector keeps equally many tokens of two very long contexts."""
    once, twice = (
        component.select(
            saliency, attrs.evolve(context, seen_len=tuple(n + more for n in context.seen_len))
        )
        for more in (10**6, 2 * 10**6)
    )
    same = torch.equal(once, twice)
    require(same, "a selector that is_bounded must keep equally many tokens of a longer context")


def check_propagation(component: PropagationPolicy, *, shrink: bool = False) -> None:
    """Run property tests of the `PropagationPolicy` contract on a propagation policy.

    Args:
        component: The propagation policy.
        shrink: True searches for the smallest layer that breaks the contract, which may take a
            minute and needs hypothesis; False shows the first one found.

    Raises:
        TypeError: ``component`` is no `PropagationPolicy`.
        AssertionError: It breaks the contract; the message says how.
        ImportError: ``shrink`` is True, and hypothesis is not installed.
    """
    check_kind("component", component, PropagationPolicy)
    check_propagation_declares(component)
    for num_layers in (8, 32, 36):
        check_layers(component, num_layers)

    def run(draws: Draws, context: LayerContext) -> None:
        # Whole numbers: their mean over heads is the same in any order of summation.
        saliency = (draw_saliency(draws, context) * (1 << 20)).round()
        context = _at_acting_layer(component, context, draws)
        before = snapshot(context, saliency)
        protected = component.protected(context)
        name = "protected [batch, new_len]"
        check_tensor(name, protected, torch.bool, [context.batch, context.new_len])
        passed = component.propagate(saliency, context)
        require(snapshot(context, saliency) == before, "propagate must not modify its arguments")
        if passed is not None:
            rows = [context.batch, None]
            check_tensor("passed_on [batch, passed_len]", passed, torch.int64, rows)
        check_passed_in_shares(component, context, saliency, passed)
        if not component.decides_by_content:
            _check_counts(component, context, saliency, passed)
        if passed is None:
            _require_all_fit(component, context)
            return
        require(
            any(component.acting_layers(count) for count in (8, 32, 36)),
            "acting_layers must name the layers after which tokens are dropped, got none",
        )
        ranking = component.ranking(saliency, context)
        rows = [context.batch, context.new_len]
        check_tensor("ranking [batch, new_len]", ranking, torch.float32, rows)
        positions = context.positions[:, 0, context.key_len - context.new_len :]
        positions = positions.masked_fill(~context.new_valid, -1)
        for row in range(context.batch):
            check_protected(component, protected[row], positions[row])
            check_choice(
                passed[row],
                valid=context.new_valid[row],
                protected=protected[row],
                saliency=ranking[row] if says_how_it_ranks(component) else None,
                budget=component.budget,
                seen_len=context.seen_len[row],
                exact=not _acts_often(component, context),
            )
            require(
                int(passed[row, -1]) == context.new_len - 1,
                f"the last token, {context.new_len - 1}, must go on, got {passed[row].tolist()}",
            )
            _check_passed_alone(component, context, saliency, passed, row)

    run_examples(run, lambda draws: draw_context(draws, 0, component), shrink=shrink)


def _check_counts(
    component: PropagationPolicy, context: LayerContext, saliency: Tensor, passed: Tensor | None
) -> None:
    """Check that the number of tokens that go on does not depend on the saliency."""
    other = attrs.evolve(context, keys=context.values, values=context.keys)
    found = component.propagate(saliency.amax() - saliency, other)
    counts = [
        (context.new_valid if each is None else each >= 0).sum(dim=1).tolist()
        for each in (passed, found)
    ]
    require(
        counts[0] == counts[1],
        "the number of tokens that go on must depend only on lengths and kinds, unless "
        f"decides_by_content is True, but {counts[0]} go on by one saliency and {counts[1]} by "
        "another",
    )


def _at_acting_layer(
    component: PropagationPolicy, context: LayerContext, draws: Draws
) -> LayerContext:
    """Return a copy of the layer context with a layer index after which the policy drops tokens."""
    num_layers = draws.choice([8, 32, 36])
    acting = sorted(component.acting_layers(num_layers))
    if not acting:
        return context
    return attrs.evolve(context, layer_idx=draws.choice(acting), num_layers=num_layers)


def _acts_often(component: PropagationPolicy, context: LayerContext) -> bool:
    """True if a propagation policy drops tokens after more than one layer."""
    return len(component.acting_layers(context.num_layers)) > 1


def _check_passed_alone(
    component: PropagationPolicy, context: LayerContext, saliency: Tensor, passed: Tensor, row: int
) -> None:
    alone = row_alone(context, row)
    first = context.new_len - alone.new_len
    own_saliency = saliency[row : row + 1, :, context.key_len - alone.key_len :].clone()
    own = component.propagate(own_saliency, alone)
    expected = torch.arange(alone.new_len) if own is None else own[0]
    here = passed[row][passed[row] >= 0]
    require(
        torch.equal(here, expected + first),
        f"a padded row must pass on the same tokens as without padding, row {row} passes on "
        f"{here.tolist()} instead of {(expected + first).tolist()}",
    )


def _require_all_fit(component: PropagationPolicy, context: LayerContext) -> None:
    """Check that a policy which drops no tokens has a budget large enough for all of them."""
    if component.budget is None or _acts_often(component, context):
        return
    new_lens = context.new_valid.sum(dim=1).tolist()
    fixed = component.protected(context).sum(dim=1).tolist()
    for new, protected, seen in zip(new_lens, fixed, context.seen_len, strict=True):
        passed = component.budget.count(seen_len=seen, available=new, protected=protected)
        require(
            passed == new, f"only {passed} of {new} tokens may go on, but propagate returned None"
        )
