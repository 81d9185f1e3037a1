"""Compute the bytes that a policy needs while it chooses a layer's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvpolicy.context import LayerContext
from kvpolicy.evaluation.cost.live_bytes import LiveBytes
from kvpolicy.evaluation.cost.model_shape import LayerShape
from kvpolicy.layer_inputs import AttentionSettings, LayerInputs
from kvpolicy.part_calls import DeferredChecks, kept_by, saliency_of
from kvpolicy.policy import CachePolicy
from kvpolicy.rotary import PlainRotary

# Lengths at which code that depends on values is really run; its memory grows with the length.
SHORT, LONGER = 256, 512
# The same for scores, at a length where blocks have their full size.
SCORED_SHORT, SCORED_LONGER = 16384, 32768
# The most queries times keys that are scored here; larger blocks take as much memory.
MOST_PAIRS = 1 << 26


def deciding_bytes(
    policy: CachePolicy,
    layer: LayerShape,
    place: tuple[int, int],
    key_len: int,
    *,
    dtype: torch.dtype,
    device: str = "cuda",
    query_len: int | None = None,
) -> int:
    """Return the peak bytes a policy needs to choose a layer's tokens, its inputs excluded.

    Scores are computed in blocks, of which a GPU's are larger than a processor's. For a GPU the
    scorer is run without numbers; choosing depends on numbers, and is run on short contexts.

    Args:
        policy: The policy, its layers placed.
        layer: The layer's sizes.
        place: Its index, and the model's number of layers.
        key_len: Tokens to choose from.
        dtype: Of queries, keys and values.
        device: ``"cuda"`` or ``"cpu"``: where the model is meant to run.
        query_len: The most queries that it is shown, as of a prompt's last chunk; None for as many
            as it asks for.
    """
    if not layer.query_heads or not layer.token_elements:
        return 0

    def shown(length: int, on: str) -> LayerContext:
        return _context(policy, layer, place, length, dtype, on, query_len)

    scores = policy.rereading is None  # otherwise nothing is scored before the second reading
    if device == "cpu" or key_len <= LONGER:
        return _measured(policy, shown(key_len, "cpu"), scores=scores)
    contexts = [shown(n, "cpu") for n in (SHORT, LONGER)]
    times = (key_len - SHORT) / (LONGER - SHORT)
    scoring = 0
    if scores and policy.scorer is not None and _needs_saliency(policy, place):
        try:
            scoring = _scored(policy, key_len, lambda length: shown(length, "meta"))
        except (NotImplementedError, RuntimeError):  # it reads values
            low, high = (_measured(policy, each) for each in contexts)
            return _on_line(low, high, times)
    low, high = (_measured(policy, each, scores=False) for each in contexts)
    return max(scoring, _on_line(low, high, times))


def _scored(policy: CachePolicy, key_len: int, shown: Callable[[int], LayerContext]) -> int:
    """Return the peak bytes that a policy's scorer needs on a GPU for ``key_len`` tokens."""
    if key_len <= SCORED_LONGER:
        return _scoring(policy, shown(key_len))
    times = (key_len - SCORED_SHORT) / (SCORED_LONGER - SCORED_SHORT)
    low, high = (_scoring(policy, shown(length)) for length in (SCORED_SHORT, SCORED_LONGER))
    return _on_line(low, high, times)


def _on_line(low: int, high: int, times: float) -> int:
    return round(low + (high - low) * times)


def _needs_saliency(policy: CachePolicy, place: tuple[int, int]) -> bool:
    index, num_layers = place
    acts = index in policy.propagation.acting_layers(num_layers)
    return policy.selector.needs_saliency or (acts and policy.propagation.needs_saliency)


def _context(
    policy: CachePolicy,
    layer: LayerShape,
    place: tuple[int, int],
    key_len: int,
    dtype: torch.dtype,
    device: str,
    most: int | None,
) -> LayerContext:
    asked = (policy.num_queries, key_len, most)
    query_len = min(each for each in asked if each is not None)
    if device == "meta":
        query_len = min(query_len, MOST_PAIRS // key_len)

    def random(heads: int, length: int, width: int) -> Tensor:
        return torch.randn(1, heads, length, width, device=device).to(dtype)

    positions = torch.arange(key_len, device=device).expand(1, layer.kv_heads, -1)
    weight = None
    if policy.needs_output_weight:
        hidden = layer.query_heads * layer.value_dim
        weight = torch.zeros(layer.query_heads, layer.value_dim, hidden, dtype=dtype, device=device)
    return LayerContext(
        layer_idx=place[0],
        num_layers=place[1],
        queries=random(layer.query_heads, query_len, layer.key_dim),
        keys=random(layer.kv_heads, key_len, layer.key_dim),
        values=random(layer.kv_heads, key_len, layer.value_dim),
        positions=positions,
        new_valid=torch.ones(1, key_len, dtype=torch.bool, device=device),
        seen_len=(key_len,),
        attention=AttentionSettings(layer.key_dim**-0.5),
        layer=LayerInputs(
            rotary=PlainRotary(layer.key_dim) if policy.needs_rotary else None,
            output_weight=weight,
            history=tuple(
                torch.rand(1, layer.query_heads, key_len, device=device)
                for _ in range(min(policy.history_layers, place[0]))
            ),
        ),
    )


def _tensors(context: LayerContext) -> list[Tensor]:
    found = [context.keys, context.values, context.positions, context.new_valid]
    found += [context.queries] if context.query_len else []
    weight = context.layer.output_weight
    return [*found, *context.layer.history, *([] if weight is None else [weight])]


def _measured(policy: CachePolicy, context: LayerContext, *, scores: bool = True) -> int:
    """Return the peak bytes of choosing a layer's tokens, measured on an actual run."""
    acts = context.layer_idx in policy.propagation.acting_layers(context.num_layers)
    with torch.no_grad(), LiveBytes(_tensors(context)) as live:
        if scores and policy.propagation.restarts and acts:
            policy.decide_restart(context)
        elif scores:
            policy.decide(context)
        else:
            _choose(policy, context, acts)
    return int(live.peak)


def _choose(policy: CachePolicy, context: LayerContext, acts: bool) -> None:
    saliency = None
    if policy.scorer is not None and _needs_saliency(
        policy, (context.layer_idx, context.num_layers)
    ):
        saliency = torch.rand(1, context.query_heads, context.key_len)
    kept_by(policy.selector, saliency, context, DeferredChecks())
    if acts:
        policy.propagation.propagate(saliency, context)


def _scoring(policy: CachePolicy, context: LayerContext) -> int:
    """Return the peak bytes of a policy's scorer, measured on torch's `meta` device."""
    assert policy.scorer is not None
    nothing_padded = _NothingPadded()  # type: ignore[no-untyped-call]
    with torch.no_grad(), nothing_padded, LiveBytes(_tensors(context)) as live:
        saliency_of(policy.scorer, context, DeferredChecks())
    return int(live.peak)


class _NothingPadded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A torch mode in which a bool `meta` tensor counts as True, as if no token were padding."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            asked: Tensor = args[0]
            if asked.is_meta and asked.dtype == torch.bool:
                return True
        return func(*args, **(kwargs or {}))
