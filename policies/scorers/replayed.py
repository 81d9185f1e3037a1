"""Scores tokens by the attention that the prompt's queries would give right after the prompt."""

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import block_bytes
from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer
from kvpolicy.selection import gather_slots

# First tokens of a row, which take much of most queries' attention: always in the sample.
FIRST = 4


@attrs.frozen
class ReplayedAttentionScorer(Scorer):
    """Scores tokens by the attention that the queries just before them give, replayed at the end.

    A question that comes later asks from behind the prompt. So every new query is taken before
    rotary embedding and rotated to the position after the row's last token; with ``q'`` such a
    query, ``saliency[g, j] = max over new queries i with j - reach <= i <= j, and the query heads h
    of KV head g, of softmax(q'_i . k * scaling)[j]``, in float32.

    Why only the queries just before: an answer is copied token by token. Having said one token, the
    model looks for what followed it in the prompt; the query of that token in the prompt looks for
    the same. Queries far away match by chance and say less. Slots count, so that where tokens were
    dropped, those that are left are neighbours.

    The softmax runs over all keys, but its denominator is estimated from the first 4 of a row and
    ``sample_size`` others at equal distances, each of which stands for as many. It is exact if
    there are no more keys. So the products of queries and keys grow with the prompt's length and
    not with its square.

    What was held before the queries' own tokens, in a later turn and while an answer is decoded, is
    judged by all queries.

    Args:
        reach: Queries before a token that judge it, beside its own, at least 0.
        sample_size: Keys from which the denominator is estimated, at least 1.

    Raises:
        TypeError: An argument is not an int.
        ValueError: ``reach`` is below 0 or ``sample_size`` below 1.

    Example:
        >>> ReplayedAttentionScorer().needs_rotary
        True

    Source: This project; the maximum over queries is KVzip's (arXiv 2505.23416).
    """

    num_queries = None  # all
    needs_rotary = True  # it rotates queries to another position

    reach: int = attrs.field(default=4, kw_only=True)
    sample_size: int = attrs.field(default=512, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("reach", self.reach)
        check_count("sample_size", self.sample_size, minimum=1)

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        keys = context.keys.float()
        sampled, shares = self._sample(context, keys)
        near = keys.new_full(context.positions.shape, -torch.inf)
        older = _older(context)
        far = None if older is None else near.clone()
        count = _block_size(context, sampled.shape[2] if older is None else context.key_len)
        for start in range(0, context.query_len, count):
            queries = _replayed(context, slice(start, start + count))
            totals = _totals(context, queries, sampled, shares)
            # A query of padding judges nothing.
            places = context.query_places[:, None, start : start + count, None]
            totals = totals.masked_fill_(places < 0, torch.inf)
            self._judge_near(context, near, keys, start, queries, totals)
            if far is not None:
                found = _products(context, queries, keys).sub_(totals[..., None])
                torch.maximum(far, found.flatten(2, 3).amax(dim=2), out=far)
        if older is not None and far is not None:
            near = torch.where(older, far, near)
        return near.clamp_(max=0.0).exp_().masked_fill_(~context.valid, 0.0)

    def _judge_near(
        self,
        context: LayerContext,
        near: Tensor,
        keys: Tensor,
        start: int,
        queries: Tensor,
        totals: Tensor,
    ) -> None:
        """Raise ``near`` to what each query gives its own token and the ones just behind it."""
        first = context.key_len - context.query_len + start  # the slot of the first query's token
        for behind in range(min(self.reach + 1, context.key_len - first)):
            judged = slice(first + behind, min(first + behind + queries.shape[2], context.key_len))
            count = judged.stop - judged.start
            products = (queries[:, :, :count] * keys[:, :, judged, None]).sum(dim=-1)
            found = context.attention.capped(products).sub_(totals[:, :, :count]).amax(dim=-1)
            near[:, :, judged] = torch.maximum(near[:, :, judged], found)

    def _sample(self, context: LayerContext, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys ``[batch, kv_heads, count, head_dim]``, and logs of what each stands for."""
        held = (context.positions >= 0).sum(dim=-1, keepdim=True)
        others = (held - FIRST).clamp(min=0)
        picked = others.clamp(max=self.sample_size)
        order = torch.arange(min(self.sample_size, context.key_len), device=keys.device)
        # In whole numbers: the middle of each of `picked` equal parts.
        middles = FIRST + (2 * order + 1) * others // (2 * picked).clamp(min=1)
        firsts = torch.arange(FIRST, device=keys.device).expand(*held.shape[:2], -1)
        there = torch.cat([firsts < held, order < picked], dim=-1)
        slots = torch.cat([firsts, middles], dim=-1) + context.key_len - held
        share = (others / picked.clamp(min=1)).log().expand_as(middles)
        shares = torch.cat([torch.zeros_like(firsts, dtype=torch.float32), share], dim=-1)
        return gather_slots(keys, slots.where(there, -1)), shares.masked_fill(~there, -torch.inf)


def _older(context: LayerContext) -> Tensor | None:
    """Mark the keys that all queries judge, bool ``[batch, 1, key_len]``; None without such."""
    slots = torch.arange(context.key_len, device=context.keys.device)
    if context.decoding.query_positions is not None:
        return torch.ones_like(slots, dtype=torch.bool)[None, None]
    if context.key_len == context.query_len and context._unpadded:
        return None
    older = slots < context.key_len - context.query_valid.sum(dim=1)[:, None, None]
    return older if bool((older & context.valid).any()) else None


def _replayed(context: LayerContext, shown: slice) -> Tensor:
    """Return queries as the position after the row would ask them, scaled, grouped by KV head."""
    rotary = context.layer.rotary
    assert rotary is not None
    places = context.query_places[:, None, shown]
    after = context.positions[:, :1, -1:] + 1  # the last slot is every row's last token
    queries = context.queries[:, :, shown].float()
    queries = rotary.moved(queries, places, after.expand_as(places))
    grouped = queries.reshape(context.batch, context.kv_heads, -1, *queries.shape[2:])
    return grouped.transpose(2, 3) * context.attention.scaling


def _products(context: LayerContext, queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply ``[batch, kv_heads, count, group, head_dim]`` with keys, as the softmax gets it."""
    products = queries.flatten(2, 3) @ keys.transpose(-1, -2)
    return context.attention.capped(products).view(*queries.shape[:4], -1)


def _totals(context: LayerContext, queries: Tensor, sampled: Tensor, shares: Tensor) -> Tensor:
    """Return logs of the softmax's denominators, ``[batch, kv_heads, count, group]``."""
    products = _products(context, queries, sampled).add_(shares[:, :, None, None])
    largest = products.amax(dim=-1, keepdim=True)
    totals = products.sub_(largest).exp_().sum(dim=-1).log_().add_(largest[..., 0])
    if context.attention.sinks is None:
        return totals
    return totals.logaddexp(context.attention.sinks.float().view(context.kv_heads, 1, -1))


def _block_size(context: LayerContext, key_len: int) -> int:
    """Return how many queries to process at a time, to limit memory use."""
    query_bytes = 4 * context.batch * context.query_heads * key_len
    return max(block_bytes(context.keys.device) // query_bytes, 1)
