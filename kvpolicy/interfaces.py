"""The interfaces of a policy's three parts: `Scorer`, `KVSelector` and `PropagationPolicy`.

Implementations are frozen attrs classes. They hold configuration only, and every argument has a
default. Each interface has one abstract method; properties declare which inputs the method needs,
and `CachePolicy` checks these declarations when it is built. Test a new part with
`kvpolicy.testing`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from torch import Tensor

from kvpolicy.budgets import Budget
from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.part import Part
from kvpolicy.scorer import Scorer

__all__ = ["KVSelector", "Part", "PropagationPolicy", "Scorer", "nearest_layer"]


class KVSelector(Part, abc.ABC):
    """Base of selectors: chooses which keys and values a layer keeps for decoding."""

    @property
    def needs_saliency(self) -> bool:
        """True if `select` reads the saliency; otherwise it may be given None."""
        return True

    @property
    def protected_tail(self) -> int:
        """The number of last tokens that are always kept."""
        return 0

    @property
    def protected_first(self) -> int:
        """The number of the context's first tokens that are always kept."""
        return 0

    @property
    def budget(self) -> Budget | None:
        """The number or fraction of tokens kept per row; None if it differs by layer or head."""
        return None

    @property
    def decides_together(self) -> bool:
        """True if the selector chooses for all layers at once, with `select_together`.

        Every layer then holds all tokens until the last one has been scored.
        """
        return False

    @property
    def equal_counts(self) -> bool:
        """True if all heads of all layers keep equally many tokens of a batch row.

        Only layers that all tokens reach count. ``CachePolicy(gapless=True)`` needs this.
        """
        return False

    @property
    def unequal_heads(self) -> bool:
        """True if heads of a layer may keep different numbers of tokens of one batch row.

        Such a selector is refused under flash attention, which has no mask for each head.
        """
        return False

    @property
    def keeps_all(self) -> bool:
        """True if the selector keeps every token.

        A class that overrides `select` has to declare this again; otherwise it is ignored.
        """
        return False

    @property
    def is_bounded(self) -> bool:
        """True if the number of tokens kept does not grow with the context."""
        return self.budget is not None and self.budget.tokens is not None

    def protected(self, context: LayerContext) -> Tensor:
        """Mark the tokens that the selector always keeps, bool ``[batch, kv_heads, key_len]``."""
        return context.is_tail(self.protected_tail) | context.is_first(self.protected_first)

    def kept_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return the fraction of a prompt's tokens that each layer keeps if all tokens reach it.

        Averaged over the KV heads; 1 if the selector has no budget, unless it overrides this.

        Args:
            num_layers: Layers of the model.
            context_len: Length of the prompt, needed where a budget is a number of tokens.

        Raises:
            TypeError: ``num_layers`` or ``context_len`` is not an int.
            ValueError: One of them is below 1, or a number of tokens cannot become a fraction
                without ``context_len``.
        """
        check_count("num_layers", num_layers, minimum=1)
        if self.budget is None:
            return [1.0] * num_layers
        fixed = self.protected_tail + self.protected_first
        return [self.budget.fraction(context_len, protected=fixed)] * num_layers

    def kept_counts(self, context: LayerContext) -> tuple[int, ...] | None:
        """Return how many tokens each head keeps per row, if lengths alone tell; else None.

        Use `kvpolicy.host_counts.held_counts`, budgets and other numbers: reading a tensor would
        wait for the device at every layer of a prompt. When the forward ends, the counts are
        compared with what `select` returned. A class that overrides `select` or `protected` has to
        override this method as well; otherwise it is not called.

        Args:
            context: The layer, whose `held_counts` are known; nothing in it may be modified.

        Returns:
            For each row, a number of tokens; None where tensors decide.
        """
        return None

    @abc.abstractmethod
    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the indices of the keys that one layer keeps.

        Args:
            saliency: float32 ``[batch, query_heads or kv_heads, key_len]``, larger means keep.
            context: The layer; nothing in it may be modified.

        Returns:
            int64 ``[batch, kv_heads, kept_len]``, indices into the keys: ascending, unique, never
            padding. Rows that keep fewer than ``kept_len`` are filled with -1 on the left.
        """

    def select_together(
        self, saliencies: Sequence[Tensor], contexts: Sequence[LayerContext]
    ) -> list[Tensor]:
        """Return the indices of the keys that every layer keeps, chosen for all layers at once.

        For a single layer the result is that of `select`.

        Args:
            saliencies: The saliency of each layer that has something to choose, as in `select`.
            contexts: The same layers, with empty keys, values and queries. Layers may have
                different numbers of heads and tokens; a row with nothing to choose at a layer has
                no valid tokens there.

        Returns:
            For each layer, what `select` would return.

        Raises:
            TypeError: The selector chooses layer by layer.
        """
        raise TypeError(
            "select_together must be called only on a selector that decides_together, got "
            f"{self}, which chooses layer by layer; use select"
        )


class PropagationPolicy(Part, abc.ABC):
    """Base of policies that choose which tokens go on to the next layer during prefill.

    A policy acts after the layers in `acting_layers`, in one of two ways. If it *drops* tokens, the
    next layers compute only the tokens that go on. If it *restarts*, the layers so far serve for
    the choice only, and the prefill runs again from the embeddings on the chosen tokens, at
    positions without gaps. `restarts` says which.
    """

    @property
    def restarts(self) -> bool:
        """True if the prefill runs again on the chosen tokens only; just one layer then chooses."""
        return False

    @property
    def needs_saliency(self) -> bool:
        """True if `propagate` reads the saliency; otherwise it may be given None."""
        return True

    @property
    def protected_tail(self) -> int:
        """The number of last tokens that always go on to the next layer; at least 1."""
        return 1

    @property
    def protected_first(self) -> int:
        """The number of the context's first tokens that always go on to the next layer."""
        return 0

    @property
    def budget(self) -> Budget | None:
        """The number or fraction of a row's tokens that go on to the next layer; None if not fixed.

        If several layers act with different budgets, the smallest.
        """
        return None

    @property
    def decides_by_content(self) -> bool:
        """True if how many tokens go on to the next layer depends on the prompt's content.

        The number is then known only once the prompt is read: there is no `budget`, and
        `layer_rates` are upper bounds.
        """
        return False

    def protected(self, context: LayerContext) -> Tensor:
        """Mark the new tokens that always go on to the next layer: bool ``[batch, new_len]``."""
        return context.is_new_tail(self.protected_tail) | context.is_new_first(self.protected_first)

    def ranking(self, saliency: Tensor, context: LayerContext) -> Tensor:
        """Return the score by which each new token goes on or not: its mean saliency over heads.

        Args:
            saliency: As given to `propagate`.
            context: The layer; nothing in it may be modified.

        Returns:
            float ``[batch, new_len]``, the same in every process under tensor parallelism. Of two
            tokens that are not protected, the one with the higher score goes on first.
        """
        return context.layer.heads.mean(saliency[..., context.key_len - context.new_len :])

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        """Return the indices of the layers after which tokens may be dropped.

        Raises:
            ValueError: The policy's layers do not lie in a model of ``num_layers`` layers.
        """
        return frozenset()

    def placed(self, num_layers: int, eligible: Sequence[int]) -> PropagationPolicy:
        """Return a copy for a given model, with a value for each layer index that was left unset.

        Args:
            num_layers: Layers of the model.
            eligible: Layers that see the whole context, so that tokens may be dropped after them;
                ascending, at least one.
        """
        return self

    def layer_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return the fraction of the prompt's tokens that reach each layer.

        If the policy `decides_by_content`, these are upper bounds.

        Args:
            num_layers: Layers of the model.
            context_len: Length of the prompt, needed where a budget is a number of tokens.

        Raises:
            ValueError: A number of tokens cannot become a fraction without ``context_len``.
        """
        return [1.0] * num_layers

    def prefill_passes(
        self, num_layers: int, context_len: int | None = None
    ) -> tuple[list[float], ...]:
        """Return the fraction of tokens that each layer computes, for every pass of the prefill.

        The last pass has the rates of `layer_rates`. A policy that restarts has one pass before
        it, with rate 0 for the layers that this pass does not run.

        Args:
            num_layers: Layers of the model.
            context_len: Length of the prompt, needed where a budget is a number of tokens.

        Raises:
            ValueError: See `layer_rates`.
        """
        return (self.layer_rates(num_layers, context_len),)

    @abc.abstractmethod
    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
        """Return the indices of the new tokens that go on to the next layer; None for all.

        Args:
            saliency: float32 ``[batch, query_heads or kv_heads, key_len]``, larger means pass on;
                the layer's new tokens are the last ``context.new_len`` of the keys.
            context: The layer; nothing in it may be modified.

        Returns:
            int64 ``[batch, passed_len]``, indices into the layer's new tokens: ascending, unique,
            never padding, the last token among them; rows that pass on fewer are filled with -1 on
            the left. None passes everything on.
        """


def nearest_layer(wanted: int, eligible: Sequence[int]) -> int:
    """Return the allowed layer index nearest to a wanted one; of two equally near, the later.

    Example:
        >>> nearest_layer(3, [1, 2, 4, 5])
        4
    """
    return min(eligible, key=lambda layer: (abs(layer - wanted), -layer))
