"""Scores tokens by comparing their keys and values with later tokens', without queries."""

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


@attrs.frozen
class LagKVScorer(Scorer):
    """Scores tokens by the spread of their channels, scaled to the value range of later tokens.

    After the sinks, the tokens that a KV head holds are divided into runs of ``lag_size``, counted
    from the row's first. With ``low`` and ``high`` the smallest and largest value in the next run,
    per channel, ``s_j = softmax over the run of the standard deviation over channels of
    (x_j - low) / (high - low)``, computed for keys and for values and added up. ``saliency[h, j] =
    r / lag_size`` per KV head ``h``, with ``r`` the rank of ``s_j`` in its run, from 0: every run
    keeps the same share. The last full run and the tokens after it have no next run; they rank
    above all earlier runs, newer tokens higher, in [1, 2). Sinks have 2.

    Args:
        num_sinks: First tokens of the row, which come first of all, at least 0.
        lag_size: Tokens of a run, at least 1.

    Raises:
        TypeError: An argument is not an int.
        ValueError: An argument is out of its range.

    Example:
        >>> LagKVScorer(lag_size=64).num_queries
        0

    Source: LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important (arXiv
    2504.04704), as kvpress implements it: unbiased deviations, keys after rotary embedding. In
    kvpress sinks, the last run and the tokens after it all score 1, so that ties decide if the
    budget is smaller; here newer tokens win, as in kvpress in contexts shorter than two runs. A
    channel that is constant in the next run, 0 / 0 in kvpress, counts as 0.
    """

    paper = "arXiv 2504.04704"

    num_sinks: int = attrs.field(default=4, kw_only=True)
    lag_size: int = attrs.field(default=128, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("num_sinks", self.num_sinks)
        check_count("lag_size", self.lag_size, minimum=1)

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        sinks = context.is_first(self.num_sinks)
        held = context.valid.sum(dim=-1, keepdim=True)
        behind = held - sinks.sum(dim=-1, keepdim=True)  # tokens after the sinks
        slots = torch.arange(context.key_len, device=context.keys.device)
        places = slots - (context.key_len - behind)  # among these; below 0 for sinks and padding
        ranked = (behind // self.lag_size - 1).clamp(min=0) * self.lag_size
        recency = (places - ranked) / (behind - ranked).clamp(min=1)
        saliency = torch.where(sinks, 2.0, 1 + recency)
        runs = context.key_len // self.lag_size
        if runs > 1:
            ranks = self._ranks(context, context.key_len - behind, runs)
            of_token = ranks.gather(-1, places.clamp(0, ranks.shape[-1] - 1))
            in_run = (places >= 0) & (places < ranked)
            saliency = torch.where(in_run, of_token / self.lag_size, saliency)
        return saliency

    def _ranks(self, context: LayerContext, first: Tensor, runs: int) -> Tensor:
        """Rank each token among its run of neighbours by the spread of its keys and values."""
        slots = first + torch.arange(runs * self.lag_size, device=first.device)
        slots = slots.clamp(max=context.key_len - 1)[..., None]
        scores = sum(
            self._unevenness(each.gather(2, slots.expand(*slots.shape[:3], each.shape[3])))
            for each in (context.keys, context.values)
        )
        # Of equal tokens the earlier ranks higher, as in selectors.
        order = torch.as_tensor(scores).argsort(dim=-1, descending=True, stable=True)
        return (self.lag_size - 1 - order.argsort(dim=-1)).flatten(2)

    def _unevenness(self, states: Tensor) -> Tensor:
        """Return the spread over channels of keys or values scaled to the range of later tokens."""
        runs = states.float().reshape(*states.shape[:2], -1, self.lag_size, states.shape[3])
        low, high = runs[:, :, 1:].aminmax(dim=3, keepdim=True)
        reach = high - low
        shares = ((runs[:, :, :-1] - low) / reach).masked_fill_(reach == 0, 0.0)
        return shares.std(dim=-1).softmax(dim=-1)
