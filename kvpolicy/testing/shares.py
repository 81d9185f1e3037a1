"""Checks a part on a layer whose heads are split over several processes.

Part of `kvpolicy.testing`. Every KV head gets a thread, with the slots that a process of its own
would hold.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import attrs
import torch
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.heads import HeadShare
from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
from kvpolicy.testing.declared import require
from kvpolicy.testing.strategies import cut

Result = TypeVar("Result")


class _Meeting:
    """Lets threads exchange tensors as the processes of tensor parallelism do."""

    def __init__(self, shares: int) -> None:
        self.tensors = [torch.empty(0)] * shares
        self.barrier = threading.Barrier(shares)

    def exchange(self, index: int, tensor: Tensor) -> list[Tensor]:
        self.tensors[index] = tensor
        self.barrier.wait()
        found = list(self.tensors)
        self.barrier.wait()
        return found


@attrs.frozen(eq=False)
class _ThreadHeads(HeadShare):
    meeting: _Meeting

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        return self.meeting.exchange(self.share, tensor)


def _shares_of(context: LayerContext) -> list[LayerContext]:
    """Split a layer context into one per KV head, as separate tensor-parallel processes see it."""
    meeting, shares = _Meeting(context.kv_heads), []
    for index in range(context.kv_heads):
        used = int(context.valid[:, index].sum(dim=-1).max())
        slots = slice(context.key_len - max(used, context.new_len), None)
        share = cut(context, heads=slice(index, index + 1), slots=slots)
        heads = _ThreadHeads(index, context.kv_heads, meeting)
        shares.append(attrs.evolve(share, layer=attrs.evolve(share.layer, heads=heads)))
    return shares


def _run(shares: list[LayerContext], function: Callable[[LayerContext], Result]) -> list[Result]:
    """Call a function on every process's share of a layer at once, each in its own thread."""

    def run(share: LayerContext) -> Result:
        try:
            return function(share)
        except BaseException:
            assert isinstance(share.layer.heads, _ThreadHeads)
            share.layer.heads.meeting.barrier.abort()  # or the others would wait for ever
            raise

    with ThreadPoolExecutor(len(shares)) as pool:
        futures = [pool.submit(run, share) for share in shares]
    errors = [error for each in futures if (error := each.exception()) is not None]
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error  # the error that broke the barrier, not the errors that followed
    return [each.result() for each in futures]


def _own(saliency: Tensor, share: LayerContext) -> Tensor:
    """Return the slice of a layer's saliency for the heads of one process."""
    heads = saliency.shape[1] // share.layer.heads.shares
    first = share.layer.heads.share * heads
    return saliency[:, first : first + heads, saliency.shape[2] - share.key_len :].clone()


def check_scores_in_shares(
    scorer: Scorer, context: LayerContext, saliency: Tensor, tolerance: float
) -> None:
    """Check that a scorer gives the same saliency when each KV head is in its own process.

    The difference may be ``tolerance`` times the largest saliency or 1.
    """
    shares = _shares_of(context)
    for share, found in zip(shares, _run(shares, scorer.score), strict=True):
        whole = _own(saliency, share)
        require(
            found.shape == whole.shape,
            "saliency must be [batch, query_heads or kv_heads, key_len] also of a KV head in a "
            f"process of its own, {list(whole.shape)}, got {list(found.shape)}",
        )
        tokens = share.valid.expand_as(whole)
        difference = float((found - whole)[tokens].abs().max())
        require(
            difference <= tolerance * max(float(whole[tokens].abs().max()), 1.0),
            "a KV head in a process of its own must get the same saliency as in the whole layer, "
            f"head {share.layer.heads.share} differs by {difference}; see context.layer.heads",
        )


def check_kept_in_shares(
    selector: KVSelector, context: LayerContext, saliency: Tensor, kept: Tensor
) -> None:
    """Check that a selector keeps the same tokens when each KV head is in its own process."""
    shares = _shares_of(context)
    found = _run(shares, lambda share: selector.select(_own(saliency, share), share))
    for index, (share, of_head) in enumerate(zip(shares, found, strict=True)):
        for row in range(context.batch):
            first = context.key_len - share.key_len
            here = [slot + first for slot in of_head[row, 0].tolist() if slot >= 0]
            whole = [slot for slot in kept[row, index].tolist() if slot >= 0]
            require(
                here == whole,
                "a KV head in a process of its own must keep the same tokens as in the whole "
                f"layer, head {index} keeps {here} instead of {whole}; see context.layer.heads",
            )


def kept_in_shares(
    selector: KVSelector, contexts: Sequence[LayerContext], saliencies: Sequence[Tensor]
) -> list[list[list[list[int]]]]:
    """Return the tokens kept when each KV head is in its own process, by head, layer and row.

    The selector decides together, and all layers have as many heads.
    """
    shares = [_shares_of(context) for context in contexts]
    own = [
        [_own(saliency, share) for share in of_layer]
        for saliency, of_layer in zip(saliencies, shares, strict=True)
    ]
    of_heads = list(zip(*shares, strict=True))

    def choose(first: LayerContext) -> list[Tensor]:
        head = first.layer.heads.share
        return selector.select_together([each[head] for each in own], list(of_heads[head]))

    found = _run(shares[0], choose)
    return [
        [
            [
                [index + context.key_len - share.key_len for index in row.tolist() if index >= 0]
                for row in kept[:, 0]
            ]
            for context, share, kept in zip(contexts, of_heads[head], of_layers, strict=True)
        ]
        for head, of_layers in enumerate(found)
    ]


def check_passed_in_shares(
    propagation: PropagationPolicy, context: LayerContext, saliency: Tensor, passed: Tensor | None
) -> None:
    """Check that the same tokens go on when each KV head is in its own process."""
    shares = _shares_of(context)
    found = _run(shares, lambda share: propagation.propagate(_own(saliency, share), share))
    for index, each in enumerate(found):
        require(
            each is passed if each is None or passed is None else torch.equal(each, passed),
            "all processes of a tensor-parallel model must pass on the same tokens, but that of "
            f"head {index} passes on {each} instead of {passed}; take means over heads by "
            "context.layer.heads.mean",
        )
