"""Scores tokens by the attention that the prompt's queries would give right after the prompt."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer
from kvpolicy.selection import gather_slots

# Queries that are held in float32 at a time; and of those that judge all keys, products.
BLOCK = 1024
PRODUCTS = 1 << 24
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

    reach: int = attrs.field(default=4, kw_only=True)
    sample_size: int = attrs.field(default=512, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("reach", self.reach)
        check_count("sample_size", self.sample_size, minimum=1)

    @property
    def num_queries(self) -> None:
        """Always None: the scorer reads all queries."""
        return

    @property
    def needs_rotary(self) -> bool:
        """Always True: the scorer rotates queries to another position."""
        return True

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        keys, places = context.keys.float(), context.query_places
        first = context.key_len - context.query_len  # the slot of the first query's token
        sampled, shares = self._sample(context, keys)
        near = keys.new_full(context.positions.shape, -torch.inf)
        older = _older(context)
        far = None if older is None else near.clone()
        row = context.batch * context.query_heads * context.key_len
        block = BLOCK if older is None else min(BLOCK, max(PRODUCTS // row, 1))
        for start in range(0, context.query_len, block):
            queries = _replayed(
                context, slice(start, start + block)
            )  # [batch, kv_heads, count, group, head_dim]
            products = _logits(context, queries.flatten(2, 3) @ sampled.transpose(-1, -2))
            totals = (products + shares[:, :, None]).logsumexp(dim=-1).view(queries.shape[:4])
            if context.attention.sinks is not None:
                sinks = context.attention.sinks.float().view(context.kv_heads, 1, -1)
                totals = torch.logaddexp(totals, sinks)
            # A query of padding judges nothing.
            unasked = places[:, None, start : start + queries.shape[2], None] < 0
            totals = totals.masked_fill(unasked, torch.inf)
            if far is not None:
                products = _logits(context, queries.flatten(2, 3) @ keys.transpose(-1, -2))
                found = (products - totals.flatten(2)[..., None]).amax(dim=2)
                torch.maximum(far, found, out=far)
            for after in range(min(self.reach + 1, context.query_len - start)):
                count = min(queries.shape[2], context.query_len - start - after)
                judged = slice(first + start + after, first + start + after + count)
                products = _logits(
                    context, (queries[:, :, :count] @ keys[:, :, judged, :, None])[..., 0]
                )
                found = (products - totals[:, :, :count]).amax(dim=-1)
                near[:, :, judged] = torch.maximum(near[:, :, judged], found)
        if older is not None and far is not None:
            near = torch.where(older, far, near)
        return near.clamp(max=0.0).exp().masked_fill(context.positions < 0, 0.0)

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


def _logits(context: LayerContext, products: Tensor) -> Tensor:
    """Return scaled products as the softmax gets them."""
    softcap = context.attention.softcap
    return products if softcap is None else (products / softcap).tanh() * softcap
