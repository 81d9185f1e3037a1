"""Bounds what a layer keeps while a long answer is decoded."""

import attrs
from torch import Tensor

from kvpolicy.checks import check_count, check_kind
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import KVSelector, Part, PropagationPolicy, Scorer
from kvpolicy.part_calls import DeferredChecks, kept_by, saliency_of, updated
from kvpolicy.precision import without_autocast
from kvpolicy.short_repr import brief


@attrs.frozen
class DecodingEviction:
    """Rule by which every layer evicts tokens at regular intervals while an answer is decoded.

    When ``every`` tokens have been appended since the last choice, the selector chooses among all
    entries of the layer, and the others are dropped. So a layer never holds more than the budget
    plus ``every`` entries. The scorer gets the last decoded queries at their own positions, as many
    as it declares in `Scorer.num_queries`, or all since the last choice if that is None. Tokens
    keep their positions.

    Args:
        scorer: Decides how much each token matters; None if the selector does not need that.
        selector: Decides which entries a layer keeps. Its budget must be a number of tokens: a
            rate does not bound a growing context.
        every: Tokens from one choice to the next, at least 1.

    Raises:
        TypeError: A part is not of its kind, or ``every`` not an int.
        ValueError: ``every`` is below 1; the selector's budget is no number of tokens; the parts do
            not fit together (see `CachePolicy`); or a part reads the saliency of other layers.

    Example:
        >>> from kvpolicy.policies import GQAGroupSelector, WindowMaxPoolScorer
        >>> selector = GQAGroupSelector(retention_tokens=512)
        >>> eviction = DecodingEviction(WindowMaxPoolScorer(), selector)
        >>> eviction.every, eviction.most_tokens
        (128, 512)
    """

    scorer: Scorer | None
    selector: KVSelector
    every: int = attrs.field(default=128, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.scorer is not None:
            check_kind("scorer", self.scorer, Scorer)
        check_kind("selector", self.selector, KVSelector)
        check_count("every", self.every, minimum=1)
        for part in self._parts:
            if part.history_layers:
                raise ValueError(
                    "the parts of a DecodingEviction must not read the saliency of earlier "
                    f"layers, since layers choose one by one while decoding, got {part} with "
                    f"history_layers={part.history_layers}"
                )
        if not self.selector.is_bounded:
            raise ValueError(
                "selector of a DecodingEviction must have a budget in tokens, such as "
                "retention_tokens=512, since a rate does not bound an answer that grows, got "
                f"{self.selector}"
            )
        if self.selector.decides_together:
            raise ValueError(
                f"selector of a DecodingEviction must choose layer by layer, got {self.selector}, "
                "which decides for all layers together; use another one, such as GQAGroupSelector"
            )
        if self.selector.needs_saliency:
            if self.scorer is None:
                raise ValueError(
                    f"scorer must be a Scorer, since {self.selector} needs saliency, got None"
                )
            check_tail(self.scorer, self.selector)

    def __str__(self) -> str:
        return brief(self)

    @property
    def num_queries(self) -> int | None:
        """The number of latest queries an eviction reads: 0 for none, None for all new ones."""
        if self.scorer is None or not (self.selector.needs_saliency or self.scorer.state_size):
            return 0
        return self.scorer.num_queries

    @property
    def state_size(self) -> int:
        """The number of values that the scorer stores per key between evictions."""
        return 0 if self.scorer is None else self.scorer.state_size

    @property
    def needs_rotary(self) -> bool:
        """True if the scorer or the selector applies the rotary embedding."""
        return any(part.needs_rotary for part in self._parts)

    @property
    def needs_output_weight(self) -> bool:
        """True if the scorer or the selector reads a layer's output weights."""
        return any(part.needs_output_weight for part in self._parts)

    @property
    def _parts(self) -> tuple[Part, ...]:
        return (self.selector,) if self.scorer is None else (self.scorer, self.selector)

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that a head holds after an eviction; None if it depends on the model."""
        budget, selector = self.selector.budget, self.selector
        if budget is None or budget.tokens is None:
            return None
        return max(budget.tokens, selector.protected_tail + selector.protected_first)

    def decide(self, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        """Choose the tokens that one layer keeps while an answer is decoded.

        Args:
            context: All entries of the layer; its new tokens are those since the last choice.

        Returns:
            ``[batch, kv_heads, kept_len]``, see `KVSelector.select`; and the scorer's new state for
            each key, kept or not, None if it keeps no state.

        Raises:
            TypeError: See `CachePolicy.decide`.
            ShapeError: See `CachePolicy.decide`.
            ValueError: See `CachePolicy.decide`.
        """
        checks = DeferredChecks()
        saliency = state = None
        # Autocast would round the scores to half precision, where many tokens tie.
        with without_autocast(context.keys.device):
            if self.scorer is not None and self.scorer.state_size:
                saliency, state = updated(self.scorer, context, checks)
            elif self.scorer is not None and self.selector.needs_saliency:
                saliency = saliency_of(self.scorer, context, checks)
            kept, _ = kept_by(self.selector, saliency, context, checks)
        checks.look()
        return kept, state

    def update_state(self, context: LayerContext) -> Tensor:
        """Return the scorer's new state for each key at a step that evicts no tokens.

        Args:
            context: The layer, with the queries since the last choice.
        """
        assert self.scorer is not None
        checks = DeferredChecks()
        with without_autocast(context.keys.device):
            _, state = updated(self.scorer, context, checks)
        checks.look()
        return state


def check_tail(scorer: Scorer, part: KVSelector | PropagationPolicy) -> None:
    """Check that a part always keeps the last tokens, to which the scorer gives no saliency."""
    if part.protected_tail < scorer.unscored_tail:
        raise ValueError(
            f"window_size of {part} must be at least {scorer.unscored_tail}, the window that "
            f"{scorer} leaves unscored, got {part.protected_tail}"
        )
