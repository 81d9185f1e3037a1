"""Checks the choices of a selector that decides for several layers together.

Part of `kvpolicy.testing`.
"""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.interfaces import KVSelector
from kvpolicy.testing.contract import check_choice, snapshot
from kvpolicy.testing.declared import check_tensor, require
from kvpolicy.testing.draws import Draws
from kvpolicy.testing.shares import kept_in_shares
from kvpolicy.testing.strategies import draw_saliency, row_alone


def check_alone(component: KVSelector, context: LayerContext, saliency: Tensor) -> None:
    """Check that ``select_together`` raises TypeError for a selector that chooses by layer."""
    try:
        component.select_together([saliency], [context])
    except TypeError:
        return
    raise AssertionError("select_together must raise TypeError if decides_together is False")


def _draw_layers(draws: Draws, context: LayerContext) -> list[tuple[Tensor, LayerContext]]:
    """Draw one to three test layers of the same batch rows, with different tokens and saliency.

    Fewer tokens reach layers after a drop; and a row has nothing to choose in a layer whose sliding
    window keeps few enough tokens.
    """
    found = []
    for index in range(draws.integer(1, 3)):
        most = context.key_len - 1
        first = draws.integer(0, most) if index and draws.choice([False, True]) else 0
        keys = slice(first, None)
        positions = context.positions[:, :, keys].flip(1) if index == 1 else context.positions
        positions = positions[:, :, -(context.key_len - first) :].clone()
        if index and draws.choice([False, True]):
            positions[draws.integer(0, context.batch - 1)] = -1
        layer = attrs.evolve(
            context,
            keys=context.keys[:, :, keys],
            values=context.values[:, :, keys],
            positions=positions,
            kinds=None,
            new_valid=context.new_valid[:, -(context.key_len - first) :],
            layer_idx=index,
            num_layers=3,
        )._outlined()
        found.append((draw_saliency(draws, layer), layer))
    return found


def check_together(
    component: KVSelector, larger: KVSelector | None, context: LayerContext, draws: Draws
) -> None:
    """Run property tests of a selector that chooses for all layers, which are made from one.

    ``larger`` is the same selector with a larger budget; None leaves that check out.
    """
    drawn = _draw_layers(draws, context)
    scores, contexts = [each for each, _ in drawn], [each for _, each in drawn]
    before = [snapshot(layer, saliency) for saliency, layer in drawn]
    kept = component.select_together(scores, contexts)
    after = [snapshot(layer, saliency) for saliency, layer in drawn]
    require(after == before, "select_together must not modify its arguments")
    require(
        isinstance(kept, list) and len(kept) == len(drawn),
        f"select_together must return a list of {len(drawn)} tensors, got {kept!r}",
    )
    one = component.select(scores[0], contexts[0])
    require(
        torch.equal(one, component.select_together(scores[:1], contexts[:1])[0]),
        "select must keep the same tokens as select_together of that layer alone",
    )
    for layer, indices in zip(contexts, kept, strict=True):
        name = "kept [batch, kv_heads, kept_len]"
        check_tensor(name, indices, torch.int64, [layer.batch, layer.kv_heads, None])
    for row in range(context.batch):
        _check_row(component, drawn, kept, row)
        _check_row_alone(component, drawn, kept, row)
    for index, found in enumerate(kept_in_shares(component, contexts, scores)):
        whole = [_tokens(each, head=index) for each in kept]
        require(
            found == whole,
            "a KV head in a process of its own must keep the same tokens as in the whole model, "
            f"head {index} keeps {found} instead of {whole}; see context.layer.heads",
        )
    if larger is not None:
        more = larger.select_together(scores, contexts)
        for small, large in zip(kept, more, strict=True):
            for few, many in zip(small.flatten(0, 1), large.flatten(0, 1), strict=True):
                lost = set(few.tolist()) - {-1} - set(many.tolist())
                require(not lost, f"a larger budget must only add tokens, but drops {lost}")


def _tokens(kept: Tensor, head: int) -> list[list[int]]:
    """Return the token indices that one head keeps, as a list for each batch row."""
    return [[index for index in row.tolist() if index >= 0] for row in kept[:, head]]


def _check_row(
    component: KVSelector,
    drawn: Sequence[tuple[Tensor, LayerContext]],
    kept: Sequence[Tensor],
    row: int,
) -> None:
    """Check one row's kept indices: in no layer may a dropped token outscore a kept one.

    What was held before the turn and the turn's own tokens may have thresholds of their own. If the
    selector declares equal counts, all heads of all layers must keep equally many tokens instead,
    if they hold equally many.
    """
    worst, best = [float("inf")] * 2, [float("-inf")] * 2  # of earlier tokens, of new ones
    counts: dict[tuple[int, int], int] = {}
    for (saliency, context), indices in zip(drawn, kept, strict=True):
        protected = component.protected(context)
        for head in range(context.kv_heads):
            fixed = protected[row, head]
            check_choice(
                indices[row, head],
                valid=context.valid[row, head],
                protected=fixed,
                saliency=None,
                budget=None,
                seen_len=context.seen_len[row],
            )
            chosen = torch.zeros_like(fixed)
            own = indices[row, head]
            chosen[own[own >= 0]] = True
            free = context.valid[row, head] & ~fixed
            if component.equal_counts:
                shown = int(context.valid[row, head].sum()), int(fixed.sum())
                require(
                    counts.setdefault(shown, int(chosen.sum())) == int(chosen.sum()),
                    "a selector that declares equal_counts must keep equally many tokens in all "
                    f"heads of all layers, got {counts[shown]} and {int(chosen.sum())}",
                )
                continue
            scores = saliency[row, head]
            last = int(context.new_valid[row].sum())
            new = torch.arange(context.key_len) >= context.key_len - last
            for turn, own in enumerate((free & ~new, free & new)):
                worst[turn] = min([worst[turn], *scores[chosen & own].tolist()])
                best[turn] = max([best[turn], *scores[own & ~chosen].tolist()])
    for low, high in zip(worst, best, strict=True):
        require(
            high <= low,
            "no dropped token of any layer may outscore a kept unprotected one of any other, but "
            f"{high} > {low}",
        )


def _check_row_alone(
    component: KVSelector,
    drawn: Sequence[tuple[Tensor, LayerContext]],
    kept: Sequence[Tensor],
    row: int,
) -> None:
    """Check that a batch row keeps the same tokens as in a batch of its own."""
    there = [bool(context.valid[row].any()) for _, context in drawn]
    layers = [each for each, any_there in zip(drawn, there, strict=True) if any_there]
    alone = [row_alone(context, row) for _, context in layers]
    own = [
        saliency[row : row + 1, :, context.key_len - each.key_len :].clone()
        for (saliency, context), each in zip(layers, alone, strict=True)
    ]
    found = iter(component.select_together(own, alone) if alone else [])
    expected = iter(zip(alone, found, strict=True))
    for (_, context), indices, any_there in zip(drawn, kept, there, strict=True):
        here = [_tokens(indices, head)[row] for head in range(context.kv_heads)]
        wanted: list[list[int]] = [[] for _ in here]
        if any_there:
            single, of_layer = next(expected)
            first = context.key_len - single.key_len
            wanted = [
                [index + first for index in _tokens(of_layer, head)[0]]
                for head in range(context.kv_heads)
            ]
        require(
            here == wanted,
            f"a padded row must keep the same tokens as without padding, row {row} keeps {here} "
            f"instead of {wanted}",
        )
