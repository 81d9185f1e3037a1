"""Calls the parts of a policy and checks what they return, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.context import LayerContext
from kvpolicy.errors import ShapeError, UnsupportedModelError
from kvpolicy.host_counts import known_counts, on_device
from kvpolicy.interfaces import KVSelector, Part, PropagationPolicy, Scorer
from kvpolicy.layer_inputs import PLAIN_LAYER, DecodingInputs


class DeferredChecks:
    """Collects error conditions on GPU tensors, to read them all later with one synchronization.

    Each read waits for the device. Messages must not hold large tensors, since they may be kept
    until all layers are done.
    """

    def __init__(self) -> None:
        self._conditions: list[Tensor] = []
        self._messages: list[Callable[[], str]] = []

    def refuse(self, condition: Tensor, message: Callable[[], str]) -> None:
        """Add an error condition: a bool tensor that means an error where it is True."""
        self._conditions.append(condition.any())
        self._messages.append(message)

    def join(self, more: DeferredChecks) -> None:
        """Append the error conditions of another `DeferredChecks`."""
        self._conditions += more._conditions
        self._messages += more._messages

    def look(self) -> None:
        """Raise ValueError for the first error condition that is True, and clear all conditions."""
        conditions, messages = self._conditions, self._messages
        self._conditions, self._messages = [], []
        if not conditions:
            return
        home = conditions[0].device  # layers may be on several devices
        found = torch.stack([each.to(home) for each in conditions]).tolist()
        for holds, message in zip(found, messages, strict=True):
            if holds:
                raise ValueError(message())


def shown_to(part: Part, context: LayerContext) -> LayerContext:
    """Return a copy of the layer context with only the inputs that a part declares to read."""
    if context.layer is PLAIN_LAYER:
        return context
    return context._with_no_more(
        history_layers=part.history_layers,
        rotary=part.needs_rotary,
        output_weight=part.needs_output_weight,
    )


def saliency_of(
    scorer: Scorer, context: LayerContext, checks: DeferredChecks, *, tested: bool = False
) -> Tensor:
    """Call a scorer on a layer with only the queries it reads; check what it returns if untested.

    What cannot be seen without waiting for the device is checked later, by ``checks``.
    """
    shown = context._showing(scorer.num_queries)
    if shown.decoding.state is not None:
        shown = shown._shown(decoding=DecodingInputs(None, shown.decoding.query_positions))
    saliency = scorer.score(shown_to(scorer, shown))
    if not tested:
        _check_saliency(scorer, saliency, context, checks)
    return saliency


def updated(scorer: Scorer, context: LayerContext, checks: DeferredChecks) -> tuple[Tensor, Tensor]:
    """Call `Scorer.update` on a layer, and check the returned saliency and state."""
    saliency, state = scorer.update(shown_to(scorer, context._showing(scorer.num_queries)))
    _check_saliency(scorer, saliency, context, checks)
    wanted = (context.batch, context.kv_heads, context.key_len, scorer.state_size)
    if not isinstance(state, Tensor):
        raise TypeError(f"update of {scorer} must return its state as a tensor, got {state!r}")
    if tuple(state.shape) != wanted:
        raise ShapeError(
            f"update of {scorer} must return a state [batch, kv_heads, key_len, state_size] = "
            f"{list(wanted)}, got {list(state.shape)}"
        )
    return saliency, state


def kept_by(
    selector: KVSelector,
    saliency: Tensor | None,
    context: LayerContext,
    checks: DeferredChecks,
    *,
    tested: bool = False,
) -> tuple[Tensor, tuple[int, ...] | None]:
    """Call a selector on a layer; return indices and `known_counts`, both checked if untested."""
    if context._stored is not None and (selector.needs_rotary or selector.needs_output_weight):
        raise UnsupportedModelError(
            f"{selector} must not rotate keys or read output weights if all heads share the "
            f"stored keys, as in layer {context.layer_idx}; use a selector that does neither"
        )
    saliency, context = as_stored(saliency, shown_to(selector, context))
    kept = selector.select(saliency, context)
    rows = context.batch, context.kv_heads
    if not tested:
        kept = check_indices(selector, kept, rows, context.key_len, checks)
    counts = known_counts(selector, context)
    if counts is not None and not tested:
        _check_counts(selector, kept, counts, checks)
    return kept, counts


def _check_counts(
    selector: KVSelector, kept: Tensor, counts: tuple[int, ...], checks: DeferredChecks
) -> None:
    """Check that a selector kept as many tokens as its `kept_counts` said."""

    def message() -> str:
        found = (kept >= 0).sum(dim=-1).tolist()
        return (
            f"kept_counts of {selector} must return how many tokens select keeps of each row in "
            f"every head, got {counts}, but select keeps {found}"
        )

    if len(counts) != len(kept) or kept.shape[2] != max(counts):
        raise ValueError(message())
    each = counts[0] if len(set(counts)) == 1 else on_device(counts, kept.device)[:, None]
    checks.refuse((kept >= 0).sum(dim=-1) != each, message)


def as_stored(saliency: Tensor | None, context: LayerContext) -> tuple[Tensor | None, LayerContext]:
    """Average saliency over heads for a selector if all heads share the same stored keys."""
    if context._stored is None:
        return saliency, context
    if saliency is not None:
        saliency = context.layer.heads.mean(saliency)[:, None]  # [batch, 1, key_len]
    return saliency, context._for_selector()


def passed_on_by(
    propagation: PropagationPolicy,
    saliency: Tensor | None,
    context: LayerContext,
    checks: DeferredChecks,
    *,
    tested: bool = False,
) -> Tensor | None:
    """Call a propagation policy on a layer; return the indices that go on, checked if untested."""
    passed = propagation.propagate(saliency, shown_to(propagation, context))
    if passed is None or tested:
        return passed
    passed = check_indices(propagation, passed, (context.batch,), context.new_len, checks)
    new_len = context.new_len
    last = pad(passed, (1, 0), value=-1)[:, -1]  # -1 in a row without tokens to pass on
    checks.refuse(
        last != new_len - 1,
        lambda: (
            f"propagate of {propagation} must pass on the last token of every row, "
            f"{new_len - 1}, got {passed[:, -1:].flatten().tolist()}; the next "
            "token is predicted from it"
        ),
    )
    return passed


def _check_saliency(
    scorer: Scorer, saliency: object, context: LayerContext, checks: DeferredChecks
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
    group, layer = saliency.shape[1] // context.kv_heads, context.layer_idx
    checks.refuse(
        saliency.isnan() & context.valid.repeat_interleave(group, dim=1),
        lambda: (
            f"score of {scorer} must return numbers, got NaN at layer {layer}; if other layers "
            "give NaN too, look for NaN in the model's parameters and inputs"
        ),
    )


def check_indices(
    part: object, indices: object, rows: tuple[int, ...], length: int, checks: DeferredChecks
) -> Tensor:
    """Check a part's indices ``[*rows, count]`` into ``length`` tokens; return them contiguous."""
    if not isinstance(indices, Tensor):
        raise TypeError(f"{part} must return a tensor of indices, got {indices!r}")
    if tuple(indices.shape[:-1]) != rows or indices.dtype != torch.int64:
        raise ShapeError(
            f"{part} must return int64 indices of shape {[*rows, 'count']}, got {indices.dtype} of "
            f"shape {list(indices.shape)}"
        )
    found = indices.contiguous()
    before, after = found[..., :-1], found[..., 1:]
    unordered = (after <= before) & (before >= 0)
    outside = (found >= length) | (found < -1)
    checks.refuse(
        unordered.any() | outside.any(),
        lambda: (
            f"indices of {part} must be ascending, unique and in [0, {length}), with -1 on the "
            f"left only, got {found.tolist()}"
        ),
    )
    return found
