"""Drops tokens after several layers of one prefill, by one policy for each."""

from collections.abc import Sequence

import attrs
from torch import Tensor

from kvpolicy.budgets import Budget
from kvpolicy.checks import as_tuple
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import PropagationPolicy
from kvpolicy.policies.propagation.token_selective import TokenSelectivePropagation

# Where stages act after the same layer, models of up to so many layers are tried for the remedy.
MOST_LAYERS = 256


def _as_tuple(stages: object) -> tuple[object, ...]:
    return as_tuple("stages", "PropagationPolicy", stages)


@attrs.frozen
class StagedPropagation(PropagationPolicy):
    """Combines several propagation policies, each of which drops tokens after layers of its own.

    Where a stage acts, it chooses among the new tokens that reached its layer, under its own
    budget, which is one of the row's whole context, not of what reached the layer.

    Args:
        stages: At least one policy that drops; no two of them act after the same layer. By default
            two: 0.4 of the context goes on after half of the layers, 0.2 after three quarters.

    Raises:
        TypeError: One of ``stages`` is not a `PropagationPolicy`.
        ValueError: There is none, or one of them restarts the prefill. Later, for a model in which
            two of them act after the same layer, such as one of fewer than 3 layers by default; or
            in which fewer layers see the whole context than there are stages without a layer.

    Example:
        >>> first = TokenSelectivePropagation(0.5, tsp_layer=0)
        >>> second = TokenSelectivePropagation(0.25, tsp_layer=2)
        >>> StagedPropagation([first, second]).layer_rates(num_layers=4)
        [1.0, 0.5, 0.5, 0.25]
    """

    stages: tuple[PropagationPolicy, ...] = attrs.field(
        default=(
            TokenSelectivePropagation(tsp_rate=0.4, tsp_depth=0.5),
            TokenSelectivePropagation(tsp_rate=0.2, tsp_depth=0.75),
        ),
        converter=_as_tuple,
    )

    def __attrs_post_init__(self) -> None:
        if not self.stages:
            raise ValueError("stages must hold at least one PropagationPolicy, got none")
        for stage in self.stages:
            if not isinstance(stage, PropagationPolicy):
                raise TypeError(f"stages must each be a PropagationPolicy, got {stage!r}")
            if stage.restarts:
                raise ValueError(
                    f"stages must drop tokens, not restart the prefill, got {stage}; use it alone"
                )

    @property
    def needs_saliency(self) -> bool:
        """True if any of the combined policies reads the saliency."""
        return any(stage.needs_saliency for stage in self.stages)

    @property
    def protected_tail(self) -> int:
        """The smallest number of last tokens that any of the combined policies protects."""
        return min(stage.protected_tail for stage in self.stages)

    @property
    def protected_first(self) -> int:
        """The smallest number of first tokens that any of the combined policies protects."""
        return min(stage.protected_first for stage in self.stages)

    @property
    def budget(self) -> Budget | None:
        """The smallest budget of the combined policies; None if they cannot be compared."""
        budgets = [stage.budget for stage in self.stages]
        known = [budget for budget in budgets if budget is not None]
        if len(known) < len(budgets) or len({budget.rate is None for budget in known}) > 1:
            return None
        return min(known, key=lambda budget: budget.amount)

    @property
    def decides_by_content(self) -> bool:
        """True if the prompt's content decides in any combined policy how many tokens go on."""
        return any(stage.decides_by_content for stage in self.stages)

    @property
    def inner_parts(self) -> tuple[PropagationPolicy, ...]:
        """The combined policies."""
        return self.stages

    def protected(self, context: LayerContext) -> Tensor:
        """Mark the tokens protected by the combined policy that acts at this layer."""
        stage = self._acting(context.num_layers).get(context.layer_idx)
        return super().protected(context) if stage is None else stage.protected(context)

    def ranking(self, saliency: Tensor, context: LayerContext) -> Tensor:
        """Rank tokens as the combined policy that acts at this layer does."""
        stage = self._acting(context.num_layers).get(context.layer_idx)
        of_all = super().ranking if stage is None else stage.ranking
        return of_all(saliency, context)

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        """Return the layers after which any of the combined policies drops tokens.

        Raises:
            ValueError: A stage's layer lies outside the model, or two stages act after the same.
        """
        return frozenset(self._acting(num_layers))

    def placed(self, num_layers: int, eligible: Sequence[int]) -> PropagationPolicy:
        """Return a copy in which combined policies without a layer are given one each for a model.

        Stages that leave one layer open keep their order: each takes the layer nearest to its
        default that lies behind the stage before and leaves a layer for every stage to come.

        Raises:
            ValueError: There are fewer eligible layers than such stages.
        """
        acting = [stage.acting_layers(num_layers) for stage in self.stages]
        is_open = [_is_open(stage, num_layers) for stage in self.stages]
        pairs = zip(acting, is_open, strict=True)
        named = {layer for layers, opened in pairs if not opened for layer in layers}
        free = [layer for layer in eligible if layer not in named]
        single = [at for at, layers in enumerate(acting) if is_open[at] and len(layers) == 1]
        if len(free) < len(single):
            raise ValueError(
                "stages must each drop after a layer of its own that sees the whole context: "
                f"{len(single)} stages have no layer given, and in a model of {num_layers} layers "
                f"these are free: {free}; combine fewer stages"
            )
        stages, behind = list(self.stages), -1
        for count, at in enumerate(sorted(single, key=lambda at: min(acting[at])), start=1):
            left = len(free) - (len(single) - count)  # the rest are for the stages to come
            stages[at] = stages[at].placed(num_layers, [e for e in free[:left] if e > behind])
            (behind,) = stages[at].acting_layers(num_layers)
            free.remove(behind)
        for at in range(len(stages)):
            if is_open[at] and at not in single and free:
                stages[at] = stages[at].placed(num_layers, free)
                free = [e for e in free if e not in stages[at].acting_layers(num_layers)]
        unchanged = all(a is b for a, b in zip(stages, self.stages, strict=True))
        return self if unchanged else attrs.evolve(self, stages=tuple(stages))

    def layer_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return the fraction of tokens that reach each layer, after all policies' drops so far."""
        self._acting(num_layers)
        rates = [stage.layer_rates(num_layers, context_len) for stage in self.stages]
        return [min(of_layer) for of_layer in zip(*rates, strict=True)]

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
        """Choose the tokens that go on, by the combined policy that acts at this layer."""
        stage = self._acting(context.num_layers).get(context.layer_idx)
        return None if stage is None else stage.propagate(saliency, context)

    def _fewest_layers(self) -> int | None:
        """Return the fewest layers of a model where every combined policy has its own layers."""
        for num_layers in range(1, MOST_LAYERS + 1):
            try:
                acting = [stage.acting_layers(num_layers) for stage in self.stages]
            except ValueError:  # a layer outside so small a model
                continue
            if len(frozenset[int]().union(*acting)) == sum(map(len, acting)):
                return num_layers
        return None

    def _acting(self, num_layers: int) -> dict[int, PropagationPolicy]:
        acting: dict[int, PropagationPolicy] = {}
        for stage in self.stages:
            for layer in sorted(stage.acting_layers(num_layers)):
                if layer in acting:
                    fewest = self._fewest_layers()
                    remedy = "give them layers of their own"
                    if fewest is not None and fewest > num_layers:
                        remedy += f", or take a model of at least {fewest} layers"
                    raise ValueError(
                        f"stages must act after different layers, but in a model of {num_layers} "
                        f"layers both {acting[layer]} and {stage} act after layer {layer}; {remedy}"
                    )
                acting[layer] = stage
        return acting


def _is_open(stage: PropagationPolicy, num_layers: int) -> bool:
    """True if a policy has no fixed layer yet, so that `placed` chooses one for it."""
    if isinstance(stage, StagedPropagation):
        return any(_is_open(inner, num_layers) for inner in stage.stages)
    own = stage.acting_layers(num_layers)
    others = [layer for layer in range(num_layers) if layer not in own]
    return bool(own and others) and stage.placed(num_layers, others) is not stage
