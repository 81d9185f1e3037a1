"""`CachePolicy`: a scorer, a selector and a propagation policy, checked against each other."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.brief import brief
from kvpolicy.checks import check_count, check_kind
from kvpolicy.context import LayerContext
from kvpolicy.errors import ShapeError
from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer


@attrs.frozen(eq=False)
class Decision:
    """What a policy decided at one layer; see `KVSelector.select` and its like.

    Args:
        kept: ``[batch, kv_heads, kept_len]``; of one head where all heads share what is stored.
        passed_on: ``[batch, passed_len]``; None for all.
    """

    kept: Tensor
    passed_on: Tensor | None


@attrs.frozen
class CachePolicy:
    """Which tokens a model keeps, layer by layer, while it reads a prompt.

    The methods of the literature are subclasses that only choose the parts. ``str()`` of a
    method is as it is written, of any other policy its parts; what is at its default is left out.

    Args:
        scorer: How much each token matters; None where neither of the others asks.
        selector: Which keys and values a layer keeps for decoding.
        propagation: Which tokens go on to the next layer during prefill.

    Raises:
        TypeError: A part is not of its kind.
        ValueError: The parts do not fit: a saliency is needed and there is no scorer; the scorer
            leaves a tail unscored that is not protected; the layers after a drop receive fewer
            tokens than they are to keep.

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

    def __attrs_post_init__(self) -> None:
        if self.scorer is not None:
            check_kind("scorer", self.scorer, Scorer)
        check_kind("selector", self.selector, KVSelector)
        check_kind("propagation", self.propagation, PropagationPolicy)
        consumers = [part for part in (self.selector, self.propagation) if part.needs_saliency]
        for part in consumers:
            if self.scorer is None:
                raise ValueError(f"scorer must be a Scorer, since {part} needs saliency, got None")
            if part.protected_tail < self.scorer.unscored_tail:
                raise ValueError(
                    f"window_size of {part} must be at least {self.scorer.unscored_tail}, the "
                    f"window that {self.scorer} leaves unscored, got {part.protected_tail}"
                )
        self._check_budgets()

    def __str__(self) -> str:
        kind = type(self)
        if not attrs.fields(kind).scorer.init:  # a method, whose fields are its arguments
            return brief(self)
        parts = (self.scorer, self.selector, self.propagation)
        return f"{kind.__name__}({', '.join(map(brief, parts))})"

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

    @property
    def num_queries(self) -> int | None:
        """Trailing queries the scorer looks at: 0 none, None all."""
        return 0 if self.scorer is None else self.scorer.num_queries

    def check_model(self, num_layers: int) -> None:
        """Check the policy's layer indices against a model.

        Raises:
            TypeError: ``num_layers`` is not an int, or ``acting_layers`` no frozenset.
            ValueError: It is below 1, a layer lies outside the model, or the prefill restarts at
                none of its layers or at several.
        """
        check_count("num_layers", num_layers, minimum=1)
        named = self.propagation.acting_layers(num_layers)
        if not isinstance(named, frozenset):  # what asks for it later takes intersections
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
        if self.propagation.restarts and len(acting) != 1:
            raise ValueError(
                f"acting_layers of {self.propagation} must be exactly one, since it restarts the "
                f"prefill, got {acting} for a model of {num_layers} layers"
            )

    def placed(self, num_layers: int, eligible: Sequence[int]) -> CachePolicy:
        """The policy with the layers that its propagation leaves open chosen for a model.

        Args:
            num_layers: Layers of the model.
            eligible: Those that see the whole context, ascending; at least one.
        """
        propagation = self.propagation.placed(num_layers, eligible)
        if propagation is self.propagation:
            return self
        placed = copy.copy(self)
        object.__setattr__(placed, "propagation", propagation)
        return placed

    def decide(self, context: LayerContext) -> Decision:
        """Choose what one layer keeps and passes on; the saliency is computed once, if at all.

        Raises:
            TypeError: ``context`` is no `LayerContext`; or a part returned no tensor, or a saliency
                that is not of floats.
            ShapeError: What a part returned has not the axes it is to have.
            ValueError: A saliency is not a number (NaN).
            ValueError: Indices are not ascending, unique and in range, or the last token is not
                passed on.
        """
        check_kind("context", context, LayerContext)
        # Autocast would round the scores to half precision, where many tokens tie.
        checks = _Checks()
        with torch.autocast(context.keys.device.type, enabled=False):
            decision = self._decide(context, checks)
        checks.look()
        return decision

    def _decide(self, context: LayerContext, checks: _Checks) -> Decision:
        propagates = not self.propagation.restarts and self._acts_at(context)
        saliency = None
        if self.selector.needs_saliency or (propagates and self.propagation.needs_saliency):
            saliency = self._score(context, checks)
        kept = self._select(saliency, context, checks)
        passed = self._propagate(saliency, context, checks) if propagates else None
        return Decision(kept, passed)

    def decide_restart(self, context: LayerContext) -> Tensor | None:
        """Choose the tokens to restart the prefill on; see `PropagationPolicy.propagate`.

        Raises:
            TypeError: As `decide`.
            ShapeError: As `decide`.
            ValueError: As `decide`.
        """
        assert self.propagation.restarts
        assert self._acts_at(context)
        checks = _Checks()
        with torch.autocast(context.keys.device.type, enabled=False):
            saliency = self._score(context, checks) if self.propagation.needs_saliency else None
            passed = self._propagate(saliency, context, checks)
        checks.look()
        return passed

    def _acts_at(self, context: LayerContext) -> bool:
        return context.layer_idx in self.propagation.acting_layers(context.num_layers)

    def _score(self, context: LayerContext, checks: _Checks) -> Tensor:
        assert self.scorer is not None
        saliency = self.scorer.score(context)
        _check_saliency(self.scorer, saliency, context, checks)
        return saliency

    def _select(self, saliency: Tensor | None, context: LayerContext, checks: _Checks) -> Tensor:
        shared = context.stored is not None
        if shared and saliency is not None:
            saliency = context.heads.mean(saliency)[:, None]  # [batch, 1, key_len]
        context = context.for_selector()
        kept = self.selector.select(saliency, context)
        heads = context.batch, context.kv_heads
        _check_indices(self.selector, kept, heads, context.key_len, checks)
        return kept

    def _propagate(
        self, saliency: Tensor | None, context: LayerContext, checks: _Checks
    ) -> Tensor | None:
        passed = self.propagation.propagate(saliency, context)
        if passed is None:
            return None
        _check_indices(self.propagation, passed, (context.batch,), context.new_len, checks)
        last = pad(passed, (1, 0), value=-1)[:, -1]  # -1 where nothing is passed on
        checks.refuse(
            last != context.new_len - 1,
            lambda: (
                f"propagate of {self.propagation} must pass on the last token of every row, "
                f"{context.new_len - 1}, got {passed[:, -1:].flatten().tolist()}; the next "
                "token is predicted from it"
            ),
        )
        return passed

    def prefill_compute_rate(self, num_layers: int, context_len: int | None = None) -> float:
        """Layer-tokens computed in prefill over layer-tokens of a full prefill.

        Args:
            num_layers: Layers of the model.
            context_len: Length of the prompt, needed where a budget is a number of tokens.

        Returns:
            A fraction, FastKV's 0.60 at 32 layers, TSP layer 15 and TSP rate 0.2; in (0, 1] but for
            a policy that restarts, which computes some layers twice.

        Raises:
            TypeError: ``num_layers`` or ``context_len`` is not an int.
            ValueError: See `check_model`; or ``context_len`` is below 1, or needed.
        """
        self.check_model(num_layers)
        if context_len is not None:
            check_count("context_len", context_len, minimum=1)
        passes = self.propagation.prefill_passes(num_layers, context_len)
        return math.fsum(rate for layer_rates in passes for rate in layer_rates) / num_layers


class _Checks:
    """What must not be, looked at together at the end: every look waits for the device."""

    def __init__(self) -> None:
        self._conditions: list[Tensor] = []
        self._messages: list[Callable[[], str]] = []

    def refuse(self, condition: Tensor, message: Callable[[], str]) -> None:
        """Refuse a bool tensor that is True anywhere."""
        self._conditions.append(condition.any())
        self._messages.append(message)

    def look(self) -> None:
        """Raise ValueError for the first condition that holds."""
        if not self._conditions:
            return
        for holds, message in zip(
            torch.stack(self._conditions).tolist(), self._messages, strict=True
        ):
            if holds:
                raise ValueError(message())


def _check_saliency(
    scorer: Scorer, saliency: object, context: LayerContext, checks: _Checks
) -> None:
    if not isinstance(saliency, Tensor) or not saliency.is_floating_point():
        raise TypeError(f"score of {scorer} must return a tensor of floats, got {saliency!r}")
    heads = (context.query_heads, context.kv_heads)
    shapes = [(context.batch, count, context.key_len) for count in heads]
    if tuple(saliency.shape) not in shapes:
        raise ShapeError(
            f"score of {scorer} must return [batch, query_heads or kv_heads, key_len] = "
            f"[{context.batch}, {heads[0]} or {heads[1]}, {context.key_len}], got "
            f"{list(saliency.shape)}"
        )
    group = saliency.shape[1] // context.kv_heads
    checks.refuse(
        saliency.isnan() & context.valid.repeat_interleave(group, dim=1),
        lambda: f"score of {scorer} must return numbers, got NaN at layer {context.layer_idx}",
    )


def _check_indices(
    part: object, indices: object, rows: tuple[int, ...], length: int, checks: _Checks
) -> None:
    if not isinstance(indices, Tensor):
        raise TypeError(f"{part} must return a tensor of indices, got {indices!r}")
    if tuple(indices.shape[:-1]) != rows or indices.dtype != torch.int64:
        raise ShapeError(
            f"{part} must return int64 indices of shape {[*rows, 'count']}, got {indices.dtype} of "
            f"shape {list(indices.shape)}"
        )
    before, after = indices[..., :-1], indices[..., 1:]
    unordered = (after <= before) & (before >= 0)
    outside = (indices >= length) | (indices < -1)
    checks.refuse(
        unordered.any() | outside.any(),
        lambda: (
            f"indices of {part} must be ascending, unique and in [0, {length}), with -1 on the "
            f"left only, got {indices.tolist()}"
        ),
    )
