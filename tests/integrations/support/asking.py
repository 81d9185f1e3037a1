"""Parts for tests that read a layer's history, rotary embedding or output weights."""

import attrs
import torch
from torch import Tensor

from kvpolicy import LayerContext, Scorer
from kvpolicy.policies import GQAGroupSelector, TokenSelectivePropagation, WindowMaxPoolScorer
from kvpolicy.selection import select_top


def with_new(saliency: Tensor, context: LayerContext, of_new: Tensor) -> Tensor:
    """Add a saliency of the new tokens, ``[batch, new_len]``, to a saliency over all keys."""
    held = context.key_len - context.new_len
    added = torch.nn.functional.pad(of_new.masked_fill(~context.new_valid, 0.0), (held, 0))
    return saliency + added[:, None]


@attrs.frozen
class LargestOfLayers(TokenSelectivePropagation):
    """Passes on the tokens of largest saliency in any of the last layers."""

    layers: tuple[int, ...] = (1,)
    back: int = 2

    @property
    def history_layers(self) -> int:
        return self.back

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        return frozenset(self.layers)

    def layer_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        rate = self.budget.fraction(context_len, protected=self.protected_tail)
        return [1.0 if index <= min(self.layers) else rate for index in range(num_layers)]

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
        assert saliency is not None
        new = context.layer.heads.mean(saliency[..., context.key_len - context.new_len :])
        means = torch.stack(
            [new, *(context.layer.heads.mean(each) for each in context.layer.history)]
        )
        protected = self.protected(context)
        counts = zip(
            context.seen_len,
            context.new_valid.sum(dim=1).tolist(),
            protected.sum(dim=1).tolist(),
            strict=True,
        )
        budgets = [
            self.budget.count(seen_len=seen, available=new_len, protected=fixed)
            for seen, new_len, fixed in counts
        ]
        return select_top(
            means.amax(dim=0)[:, None],
            budgets,
            valid=context.new_valid[:, None],
            protected=protected[:, None],
        )[:, 0]


@attrs.frozen
class CarriedOnScorer(WindowMaxPoolScorer):
    """A window scorer that adds half of the previous layer's saliency, averaged over heads."""

    @property
    def history_layers(self) -> int:
        return 1

    def score(self, context: LayerContext) -> Tensor:
        own = super().score(context)
        if not context.layer.history:
            return own
        return with_new(own, context, 0.5 * context.layer.heads.mean(context.layer.history[-1]))


@attrs.frozen
class RememberingSelector(GQAGroupSelector):
    """A selector that adds the lowest saliency of the last layers to each layer's saliency."""

    back: int = 3

    @property
    def history_layers(self) -> int:
        return self.back

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        assert saliency is not None
        if context.layer.history:
            means = torch.stack([context.layer.heads.mean(each) for each in context.layer.history])
            saliency = with_new(saliency, context, means.amin(dim=0))
        return super().select(saliency, context)


@attrs.frozen
class TurnedBackScorer(Scorer):
    """Scores a key by norms of its first channels, unrotated and rotated a row's length ahead."""

    channels: int = 2

    @property
    def needs_rotary(self) -> bool:
        return True

    def score(self, context: LayerContext) -> Tensor:
        assert context.layer.rotary is not None
        back = context.layer.rotary.turned_back(context.keys, context.positions)
        ends = torch.tensor(context.seen_len, device=back.device)[:, None, None]
        ahead = context.layer.rotary.turned(back, context.positions + ends)
        before, after = (each[..., : self.channels].float().norm(dim=-1) for each in (back, ahead))
        return before + after


@attrs.frozen
class OutputScorer(Scorer):
    """Scores a token by the norm of its value's projected output times the norm of its key."""

    @property
    def needs_output_weight(self) -> bool:
        return True

    def score(self, context: LayerContext) -> Tensor:
        assert context.layer.output_weight is not None
        group = context.query_heads // context.kv_heads
        values = context.values.float().repeat_interleave(group, dim=1)
        moved = torch.einsum("bhkv,hvd->bhkd", values, context.layer.output_weight.float())
        sizes = context.keys[..., :2].float().norm(dim=-1).repeat_interleave(group, dim=1)
        return moved.norm(dim=-1) * sizes
