"""`CachePolicy`: a scorer, a selector and a propagation policy, checked against each other."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import ClassVar, NoReturn

import attrs
from torch import Tensor

from kvpolicy.checks import check_count, check_kind
from kvpolicy.context import LayerContext
from kvpolicy.decision import Decision, DeferredLayer, check_later, kept_of_all
from kvpolicy.declarations import is_tested
from kvpolicy.decoding import DecodingEviction, check_tail
from kvpolicy.gapless import check_gapless
from kvpolicy.interfaces import KVSelector, Part, PropagationPolicy, Scorer
from kvpolicy.part_calls import DeferredChecks, kept_by, passed_on_by, saliency_of, updated
from kvpolicy.precision import without_autocast
from kvpolicy.repetition import Repetition
from kvpolicy.short_repr import brief


@attrs.frozen
class CachePolicy:
    """Decides which tokens a model keeps, layer by layer, while it reads a prompt.

    The methods of the literature are subclasses that only choose the parts. ``str()`` returns a
    method as a call of its class, and any other policy as a `CachePolicy` of its parts, without
    arguments at their defaults other than rates.

    Args:
        scorer: Decides how much each token matters; None if neither of the other two needs that.
        selector: Decides which keys and values a layer keeps for decoding.
        propagation: Decides which tokens go on to the next layer during prefill.
        decoding: Bounds what a layer holds while an answer is decoded; None lets it grow.
        rereading: A second reading of every prompt, from which the selector's saliency is computed;
            None to compute it in the first reading.
        gapless: Whether the keys that a layer keeps are rotated to the positions 0, 1, ..., and
            later tokens follow them: rotary positions then count the tokens held, not those read.
            Every head of every layer must keep the same number of tokens.
        prefill_block: Number of tokens of a prompt that are read at a time, at least 1. After each
            such block the policy chooses, as after a turn, so that memory is bounded in prefill
            too; later blocks attend only to what was kept. None reads the prompt whole.

    Raises:
        TypeError: A part is not of its kind, or ``gapless`` not a bool.
        ValueError: The parts do not fit together:

            - ``scorer`` is None, but a part needs the saliency of this layer or of earlier ones;
            - the scorer leaves trailing tokens unscored that a part does not protect;
            - layers after a drop are to keep more tokens than reach them;
            - there is a second reading, but no queries to score;
            - ``gapless`` is True, but heads or layers may hold different numbers of tokens, or
              there is a ``decoding``, a ``rereading`` or a restart;
            - ``prefill_block`` is below 1, or given with a ``rereading`` or a restart.

    Example:
        >>> from kvpolicy.policies import GQAGroupSelector, PassAllPropagation, WindowMaxPoolScorer
        >>> policy = CachePolicy(WindowMaxPoolScorer(), GQAGroupSelector(), PassAllPropagation())
        >>> policy.prefill_compute_rate(num_layers=32)
        1.0
    """

    paper: ClassVar[str] = ""

    scorer: Scorer | None
    selector: KVSelector
    propagation: PropagationPolicy
    decoding: DecodingEviction | None = attrs.field(default=None, kw_only=True)
    rereading: Repetition | None = attrs.field(default=None, kw_only=True)
    gapless: bool = attrs.field(default=False, kw_only=True)
    prefill_block: int | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.scorer is not None:
            check_kind("scorer", self.scorer, Scorer)
        check_kind("selector", self.selector, KVSelector)
        check_kind("propagation", self.propagation, PropagationPolicy)
        if self.decoding is not None:
            check_kind("decoding", self.decoding, DecodingEviction)
        if self.rereading is not None:
            check_kind("rereading", self.rereading, Repetition)
        consumers = [part for part in (self.selector, self.propagation) if part.needs_saliency]
        for part in consumers:
            if self.scorer is None:
                raise ValueError(f"scorer must be a Scorer, since {part} needs saliency, got None")
            check_tail(self.scorer, part)
        for part in (self.selector, self.propagation):
            if part.history_layers and self.scorer is None:
                raise ValueError(
                    f"scorer must be a Scorer, since {part} reads the saliency of earlier layers, "
                    "got None"
                )
        self._check_budgets()
        check_later(self.scorer, self.selector, self.rereading)
        check_kind("gapless", self.gapless, bool)
        if self.gapless:
            check_gapless(self.selector, self.propagation, self.decoding, self.rereading)
        if self.prefill_block is not None:
            self._check_block(self.prefill_block)

    def __str__(self) -> str:
        kind = type(self)
        if not attrs.fields(kind).scorer.init:  # a method's fields are its arguments
            return brief(self)
        parts = [*map(brief, (self.scorer, self.selector, self.propagation))]
        if self.decoding is not None:
            parts.append(f"decoding={brief(self.decoding)}")
        if self.rereading is not None:
            parts.append(f"rereading={brief(self.rereading)}")
        if self.gapless:
            parts.append("gapless=True")
        if self.prefill_block is not None:
            parts.append(f"prefill_block={self.prefill_block}")
        return f"{kind.__name__}({', '.join(parts)})"

    def _check_block(self, tokens: int) -> None:
        check_count("prefill_block", tokens, minimum=1)
        again = "a second reading" if self.rereading is not None else "a restart"
        if self.rereading is not None or self.propagation.restarts:
            raise ValueError(
                f"prefill_block must be None with {again}, which needs all tokens of the prompt, "
                f"got {tokens}"
            )

    def _check_budgets(self) -> None:
        kept, passed = self.selector.budget, self.propagation.budget
        if kept is None or passed is None or not kept.exceeds(passed):
            return
        unit = "tokens" if kept.rate is None else "rate"
        names = [f"{budget.name}_{unit}" for budget in (kept, passed)]
        got = f"{names[0]}={kept.amount} and {names[1]}={passed.amount}"
        if names[0] == names[1]:
            names[0] += f" of {type(self.selector).__name__}"
            names[1] += f" of {type(self.propagation).__name__}"
            got = f"{kept.amount} and {passed.amount}"
        after = "the restart" if self.propagation.restarts else "the drop"
        raise ValueError(
            f"{names[0]} must not exceed {names[1]}, since layers after {after} cannot keep more "
            f"tokens than reach them, got {got}"
        )

    @functools.cached_property
    def decides_later(self) -> bool:
        """True if layers choose their tokens only after all layers are scored."""
        return self.selector.decides_together or self.rereading is not None

    @functools.cached_property
    def num_queries(self) -> int | None:
        """The number of a prompt's last queries that the policy reads: 0 none, None all.

        Queries of a second reading do not count.
        """
        scores = self.scorer is not None and self.rereading is None
        wanted = [self.scorer.num_queries] if scores and self.scorer is not None else []
        if self._summing is not None:
            wanted.append(self._summing.num_queries)
        counts = [count for count in wanted if count is not None]
        return None if len(counts) < len(wanted) else max(counts, default=0)

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The policy's parts for prefill: its scorer (if any), selector and propagation policy.

        The scorer of the policy's `DecodingEviction` too, if it keeps a state from the prompt on.
        """
        found = (self.scorer, self.selector, self.propagation, self._summing)
        return tuple(part for part in found if part is not None)

    @functools.cached_property
    def history_layers(self) -> int:
        """The largest number of earlier layers whose saliency any part reads."""
        return max(part.history_layers for part in self.parts)

    @functools.cached_property
    def needs_rotary(self) -> bool:
        """True if any part applies the rotary embedding during prefill."""
        return any(part.needs_rotary for part in self.parts)

    @functools.cached_property
    def needs_output_weight(self) -> bool:
        """True if any part reads the attention output weights during prefill."""
        return any(part.needs_output_weight for part in self.parts)

    def remembered_layers(self, num_layers: int, choosing: Sequence[int]) -> frozenset[int]:
        """Return the layers whose saliency must be kept because a later layer reads it.

        Args:
            num_layers: Layers of the model.
            choosing: The layers at which the policy chooses, ascending; only these have a saliency.
        """
        if any(part.history_layers for part in self.parts if part is not self.propagation):
            return frozenset(choosing)
        back, found = self.propagation.history_layers, set[int]()
        for acting in self.propagation.acting_layers(num_layers) if back else ():
            found.update([layer for layer in choosing if layer < acting][-back:])
        return frozenset(found)

    def check_model(self, num_layers: int) -> None:
        """Check that the policy's layer indices exist in a model of ``num_layers`` layers.

        Raises:
            TypeError: ``num_layers`` is not an int, or ``acting_layers`` no frozenset.
            ValueError: ``num_layers`` is below 1; a layer lies outside the model; a prefill that
                restarts does so at no layer or at several; or tokens are dropped though there is a
                second reading, or ``gapless`` is True.
        """
        check_count("num_layers", num_layers, minimum=1)
        named = self.propagation.acting_layers(num_layers)
        if not isinstance(named, frozenset):  # later code computes intersections with it
            raise TypeError(
                f"acting_layers of {self.propagation} must return a frozenset of layer indices, "
                f"got {named!r}"
            )
        acting = sorted(named)
        if acting and not 0 <= acting[0] <= acting[-1] < num_layers:
            raise ValueError(
                f"acting_layers of {self.propagation} must be in [0, {num_layers - 1}] for a model "
                f"of {num_layers} layers, got {acting}"
            )
        if self.rereading is not None and acting:
            raise ValueError(
                f"rereading must be None if tokens are dropped, as {self.propagation} does, since "
                f"a second reading needs the keys of all tokens, got {self.rereading}"
            )
        if self.gapless and acting:
            raise ValueError(
                f"gapless must be False if tokens are dropped, as {self.propagation} does after "
                f"layers {acting}, since layers may then hold different numbers of tokens, got True"
            )
        if self.propagation.restarts and len(acting) != 1:
            raise ValueError(
                f"acting_layers of {self.propagation} must be exactly one, since it restarts the "
                f"prefill, got {acting} for a model of {num_layers} layers"
            )

    def placed(self, num_layers: int, eligible: Sequence[int]) -> CachePolicy:
        """Return a copy for a given model, with a value for each layer index that was left unset.

        Args:
            num_layers: Layers of the model.
            eligible: Layers that see the whole context, ascending; at least one.
        """
        propagation = self.propagation.placed(num_layers, eligible)
        if propagation is self.propagation:
            return self
        placed = copy.copy(self)
        object.__setattr__(placed, "propagation", propagation)
        return placed

    def decide(
        self,
        context: LayerContext,
        *,
        remembered: bool = False,
        checks: DeferredChecks | None = None,
        saliency: Tensor | None = None,
    ) -> Decision:
        """Choose the tokens that one layer keeps, and those that go on to the next layer.

        The saliency is computed once, if at all. If the policy `decides_later`, the tokens to keep
        are chosen in `decide_layers`.

        Args:
            context: The layer.
            remembered: Whether later layers read its saliency; see `remembered_layers`.
            checks: Collects the conditions on what the parts returned, for the caller to check
                with `DeferredChecks.look`; indices may be wrong until then. None to check at once.
            saliency: The layer's saliency, if it is known; None to ask the scorer.

        Raises:
            TypeError: ``context`` is no `LayerContext`; or a part returned no tensor, or a saliency
                that is not of floats.
            ShapeError: A part returned a tensor of the wrong shape.
            ValueError: A saliency is NaN; or indices are not ascending, unique and in range; or
                their number differs from the selector's `KVSelector.kept_counts`; or the last token
                is not passed on.
        """
        if not isinstance(context, LayerContext):
            check_kind("context", context, LayerContext)
        own = DeferredChecks() if checks is None else checks
        propagates = not self._restarts and self._acts_at(context)
        selects = self._selects_by_saliency
        needed = selects or (propagates and self.propagation.needs_saliency) or remembered
        state = kept = undecided = counts = None
        # Autocast would round the scores to half precision, where many tokens tie.
        with without_autocast(context.keys.device):
            if self._summing is not None:
                summed, state = updated(self._summing, context, own)
                saliency = summed if self._summing == self.scorer else saliency
            if needed and saliency is None:
                saliency = self._saliency(context, own)
            if self.decides_later:
                undecided = DeferredLayer.of(context, saliency if selects else None)
            else:
                tested = self._is_tested(self.selector)
                kept, counts = kept_by(self.selector, saliency, context, own, tested=tested)
            passed = None
            if propagates:
                tested = self._is_tested(self.propagation)
                passed = passed_on_by(self.propagation, saliency, context, own, tested=tested)
        if checks is None:
            own.look()
        return Decision(kept, passed, state, saliency, undecided, counts)

    def _saliency(self, context: LayerContext, checks: DeferredChecks) -> Tensor:
        assert self.scorer is not None
        return saliency_of(self.scorer, context, checks, tested=self._is_tested(self.scorer))

    def score(self, context: LayerContext) -> Tensor:
        """Compute a layer's saliency only because later layers read it; no tokens are chosen.

        Raises:
            ValueError: See `decide`, as for its other errors.
        """
        checks = DeferredChecks()
        with without_autocast(context.keys.device):
            saliency = self._saliency(context, checks)
        checks.look()
        return saliency

    def decide_layers(self, layers: Sequence[DeferredLayer]) -> list[Tensor]:
        """Choose the tokens that every layer keeps, after all layers were scored.

        Args:
            layers: The layers that have something to choose, in order, with their saliencies.

        Returns:
            For each layer ``[batch, kv_heads, kept_len]``; see `Decision`.

        Raises:
            ValueError: See `decide`, as for its other errors.
        """
        if not layers:
            return []
        checks = DeferredChecks()
        with without_autocast(layers[0].context.keys.device):
            kept = kept_of_all(self.selector, layers, checks)
        checks.look()
        return kept

    def decide_restart(
        self, context: LayerContext, saliency: Tensor | None = None
    ) -> Tensor | None:
        """Choose the tokens on which the prefill runs again.

        Args:
            context: The layer.
            saliency: Its saliency, if the caller has computed it already; None to ask the scorer.

        Raises:
            ValueError: See `decide`, as for its other errors.
        """
        assert self.propagation.restarts
        assert self._acts_at(context)
        checks = DeferredChecks()
        with without_autocast(context.keys.device):
            if self.propagation.needs_saliency and saliency is None:
                saliency = self._saliency(context, checks)
            tested = self._is_tested(self.propagation)
            passed = passed_on_by(self.propagation, saliency, context, checks, tested=tested)
        checks.look()
        return passed

    @classmethod
    def get_seq_length(cls, layer_idx: int = 0) -> NoReturn:
        """Raise TypeError, since a policy is no cache; the message says how to make one.

        Raises:
            TypeError: Always; says how a policy gets into a cache.
        """
        raise TypeError(
            f"a model must be given a cache, got the policy {cls.__name__}; pass "
            f"PolicyCache({cls.__name__}(...)), from kvpolicy.integrations.transformers"
        )

    def _acts_at(self, context: LayerContext) -> bool:
        known, count = self._acting_layers, context.num_layers
        if count not in known:
            known[count] = self.propagation.acting_layers(count)
        return context.layer_idx in known[count]

    def _is_tested(self, part: Part) -> bool:
        """True if the results of a part of this policy need no check; see `declarations.is_tested`.

        Parts are frozen, so this is found out once and not at every layer.
        """
        return id(part) in self._tested

    @functools.cached_property
    def _tested(self) -> frozenset[int]:
        parts = (self.scorer, self.selector, self.propagation)
        return frozenset(id(each) for each in parts if each is not None and is_tested(each))

    @functools.cached_property
    def _acting_layers(self) -> dict[int, frozenset[int]]:
        return {}  # keyed by the model's number of layers

    @functools.cached_property
    def _restarts(self) -> bool:
        return self.propagation.restarts

    @functools.cached_property
    def _selects_by_saliency(self) -> bool:
        return self.selector.needs_saliency and self.rereading is None

    @functools.cached_property
    def _summing(self) -> Scorer | None:
        """The scorer by which an answer's layers choose, if it keeps a state from the prompt on."""
        scorer = None if self.decoding is None else self.decoding.scorer
        return scorer if scorer is not None and scorer.state_size else None

    def prefill_compute_rate(self, num_layers: int, context_len: int | None = None) -> float:
        """Return prefill's compute as a fraction of a full prefill's, by tokens that layers read.

        Args:
            num_layers: Layers of the model.
            context_len: Length of the prompt, needed where a budget is a number of tokens.

        Returns:
            A fraction, such as 0.60 for FastKV with 32 layers, TSP layer 15 and TSP rate 0.2. It is
            in (0, 1], but may exceed 1 if the prefill restarts or the prompt is read twice.

        Raises:
            TypeError: ``num_layers`` or ``context_len`` is not an int.
            ValueError: See `check_model`; or ``context_len`` is below 1, or missing; or the
                fraction depends on the prompt, see `PropagationPolicy.decides_by_content`.
        """
        self.check_model(num_layers)
        if context_len is not None:
            check_count("context_len", context_len, minimum=1)
        if self.propagation.decides_by_content:
            raise ValueError(
                "propagation must not decide by content for a rate that is known before a prompt "
                f"is read, got {self.propagation}; read a prompt and see which tokens went on in "
                "the propagated attribute of its cache"
            )
        passes = self.propagation.prefill_passes(num_layers, context_len)
        first = math.fsum(rate for layer_rates in passes for rate in layer_rates) / num_layers
        return first + (0.0 if self.rereading is None else self.rereading.compute_rate(context_len))
