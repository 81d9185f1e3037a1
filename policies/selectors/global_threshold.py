"""Splits one budget over all layers and heads by a single threshold."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import group_mean
from kvpolicy.checks import check_kind
from kvpolicy.context import LayerContext
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.selectors.budgeted import BudgetedSelector
from kvpolicy.selection import compress, highest


@documented
@attrs.frozen
class GlobalThresholdSelector(BudgetedSelector):
    """Keeps tokens above one saliency threshold, shared by all layers and KV heads of the model.

    Layers choose after all of them were scored. The budget of a row is the sum of the tokens that
    each KV head of each layer would keep on its own, of all that have reached it. It is
    filled with the protected tokens and then the most salient tokens of any layer and head. Of
    equals the lower layer comes first, then the lower head, then the earlier token. Saliencies of
    different layers are compared directly, so they must have the same scale, as attention has. The
    saliency of a KV head is the mean over the query heads of its group.

    Args:
        retention_rate: Fraction of the context that layers and heads keep on average, in (0, 1].
        retention_tokens: Number of tokens that layers and heads keep on average, at least 1, in
            place of the rate.
        turns_apart: Whether what was held before a turn and the turn's own tokens each fill their
            share of the budget, in proportion to the tokens read, by a threshold of their own. For
            scorers that judge the two by different queries.

    Example:
        >>> GlobalThresholdSelector(0.3).decides_together
        True

    Source: KVzip (arXiv 2505.23416), section 3. Its code keeps tokens above the threshold and none
    equal to it; here the number is exact.
    """

    paper = "arXiv 2505.23416"
    decides_together = True  # one saliency threshold holds for all layers
    unequal_heads = True  # each head keeps what lies above the threshold

    turns_apart: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_kind("turns_apart", self.turns_apart, bool)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Choose tokens as if this layer were the model's only one."""
        assert saliency is not None
        return self.select_together([saliency], [context])[0]

    def _places(
        self,
        layers: Sequence[_Layer],
        seen_len: Sequence[int],
        own: Sequence[int],
        lens: Sequence[Sequence[int]],
    ) -> list[int]:
        """Return how many tokens all heads of all layers keep together in each row.

        A head counts as if it still held all tokens that have reached its layer: what it evicted in
        an earlier turn was given to other heads.
        """
        counts, held = [0] * len(seen_len), [0] * len(seen_len)
        for layer, reached in zip(layers, lens, strict=True):
            valid, fixed = layer.valid.sum(dim=2).tolist(), layer.protected.sum(dim=2).tolist()
            for row, seen in enumerate(seen_len):
                held[row] += sum(valid[row])
                counts[row] += sum(
                    self.mean_budget.count(
                        seen_len=seen, available=seen - own[row] + reached[row], protected=protected
                    )
                    for tokens, protected in zip(valid[row], fixed[row], strict=True)
                    if tokens
                )
        return [min(count, most) for count, most in zip(counts, held, strict=True)]

    def select_together(
        self, saliencies: Sequence[Tensor], contexts: Sequence[LayerContext]
    ) -> list[Tensor]:
        """Return the tokens that every layer keeps; see `KVSelector.select_together`.

        Heads that keep fewer than others of their layer are filled with -1 on the left.
        """
        layers = [
            _Layer.of(saliency, context, self.protected(context), contexts[0].keys.device)
            for saliency, context in zip(saliencies, contexts, strict=True)
        ]
        lens = [context.new_valid.sum(dim=1).tolist() for context in contexts]
        own = [max(each) for each in zip(*lens, strict=True)]  # the tokens of the turn in each row
        counts = self._places(layers, contexts[0].seen_len, own, lens)
        scores, valid, fixed, new = (
            torch.cat([getattr(layer, name).flatten(1) for layer in layers], dim=1)
            for name in ("scores", "valid", "protected", "new")
        )
        free = valid & ~fixed
        if self.turns_apart:
            shares = zip(counts, own, contexts[0].seen_len, strict=True)
            of_turn = [count * turn // max(seen, 1) for count, turn, seen in shares]
            places = _of_the_new(counts, of_turn, free, fixed, new)
            chosen = highest(scores, free & new, places)
            counts = [count - taken for count, taken in zip(counts, places, strict=True)]
            free &= ~new
        else:
            chosen = torch.zeros_like(free)
        counts = [count - one for count, one in zip(counts, fixed.sum(dim=1).tolist(), strict=True)]
        chosen |= highest(scores, free, counts)
        taken = torch.split(chosen, [layer.scores[0].numel() for layer in layers], dim=1)
        return [
            layer.kept(of_layer, context)
            for layer, of_layer, context in zip(layers, taken, contexts, strict=True)
        ]


def _of_the_new(
    counts: Sequence[int], shares: Sequence[int], free: Tensor, fixed: Tensor, new: Tensor
) -> list[int]:
    """Return how many tokens of a turn, besides protected ones, are kept in each row.

    ``free``, ``fixed`` and ``new`` are ``[batch, entries]``, of all heads of all layers.
    """
    masks = torch.stack([free & new, free & ~new, fixed & new, fixed])
    found = []
    for row, sums in enumerate(masks.sum(dim=2).T.tolist()):
        free_new, free_old, fixed_new, fixed_all = sums
        places = counts[row] - fixed_all
        # What one side does not need goes to the other.
        found.append(min(max(shares[row] - fixed_new, places - free_old, 0), free_new, places))
    return found


@attrs.frozen(eq=False)
class _Layer:
    """One layer's saliency, gathered for the heads of all tensor-parallel processes."""

    scores: Tensor
    valid: Tensor
    protected: Tensor
    new: Tensor

    @staticmethod
    def of(
        saliency: Tensor, context: LayerContext, protected: Tensor, device: torch.device
    ) -> _Layer:
        """Gather one layer's saliency from all tensor-parallel processes onto one device."""
        parts = (group_mean(saliency, context.kv_heads), context.valid, protected)
        scores, valid, always = (context.layer.heads.gather(part).to(device) for part in parts)
        slots = torch.arange(scores.shape[2], device=device)
        new = slots >= len(slots) - context.new_valid.sum(dim=1)[:, None, None].to(device)
        return _Layer(scores, valid, always, new.expand_as(always))

    def kept(self, taken: Tensor, context: LayerContext) -> Tensor:
        """Return the token indices that this process's heads keep, from a mask for all heads."""
        chosen = self.protected | taken.view_as(self.protected)
        first = context.layer.heads.share * context.kv_heads
        here = chosen[:, first : first + context.kv_heads, chosen.shape[2] - context.key_len :]
        return compress(here, int(here.sum(dim=-1).max())).to(context.keys.device)
