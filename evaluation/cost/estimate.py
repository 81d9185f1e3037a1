"""Estimate a policy's cost without a run: prefill operations and cache bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from kvpolicy.checks import check_count, check_kind
from kvpolicy.evaluation.cost.model_shape import LayerShape, ModelShape
from kvpolicy.interfaces import KVSelector, PropagationPolicy
from kvpolicy.policy import CachePolicy
from kvpolicy.repetition import Repetition


@attrs.frozen
class Flops:
    """Numbers of floating-point operations; a multiply-add counts as two.

    Args:
        linear: Of the layers' matrices: projections of attention, and MLPs.
        attention: Of queries with keys and of weights with values, causal: half the square.
        head: Of the output head, which sees the last token only.
        states: Of recurrent layers' states: each number of one is written and read for every
            token.
    """

    linear: float
    attention: float
    head: float = 0.0
    states: float = 0.0

    @property
    def layers(self) -> float:
        """The operations of all layers, without the output head."""
        return self.linear + self.attention + self.states

    @property
    def total(self) -> float:
        """The operations of the layers and the output head together."""
        return self.layers + self.head

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.linear + other.linear,
            self.attention + other.attention,
            self.head + other.head,
            self.states + other.states,
        )


@attrs.frozen
class Estimate:
    """The estimated operations and bytes of one prompt, under a policy and with full context.

    Args:
        context_len: Tokens of the prompt.
        compute_rate: Layer-tokens computed in prefill over those of a full prefill, the paper's
            figure; see `CachePolicy.prefill_compute_rate`. None where the policy decides by content
            how many tokens go on, which is known only once a prompt is read: then ``prefill`` and
            ``kept_tokens`` are the most, and `speedup` is the least.
        prefill: Operations of the prefill, the policy's own scoring not counted.
        full: Operations of a full prefill.
        kept_tokens: For each layer, the tokens it keeps, the mean over its KV heads; 0 where it
            holds nothing for a token.
        token_bytes: For each layer, the bytes of one token's keys and values, or latent.
        state_bytes: Bytes of all layers' states, which no policy cuts.
    """

    context_len: int
    compute_rate: float | None
    prefill: Flops
    full: Flops
    kept_tokens: tuple[float, ...]
    token_bytes: tuple[int, ...]
    state_bytes: int = 0

    @property
    def speedup(self) -> float:
        """The prefill speed-up over full context if only operations counted."""
        return self.full.total / self.prefill.total

    @property
    def kv_bytes(self) -> int:
        """The bytes of keys, values and recurrent states kept after prefill."""
        held = zip(self.kept_tokens, self.token_bytes, strict=True)
        return round(sum(tokens * size for tokens, size in held)) + self.state_bytes

    @property
    def full_kv_bytes(self) -> int:
        """The bytes of the cache with full context."""
        return self.context_len * sum(self.token_bytes) + self.state_bytes

    @property
    def kv_share(self) -> float:
        """The bytes kept under the policy, as a fraction of the cache with full context."""
        return self.kv_bytes / self.full_kv_bytes

    @property
    def mean_kept(self) -> float:
        """The number of tokens a layer keeps, averaged over layers that store any."""
        pairs = zip(self.kept_tokens, self.token_bytes, strict=True)
        holding = [tokens for tokens, size in pairs if size]
        return sum(holding) / len(holding)

    def as_data(self) -> dict[str, Any]:
        """Return the estimate as a dict for JSON; numbers that depend on the prompt are None."""
        known = self.compute_rate is not None
        prefill = {**attrs.asdict(self.prefill), "total": self.prefill.total}
        return {
            "prefill_compute_rate": self.compute_rate,
            "prefill_flops": prefill if known else None,
            "full_prefill_flops": {**attrs.asdict(self.full), "total": self.full.total},
            "prefill_speedup_allowed": self.speedup if known else None,
            "kept_tokens": list(self.kept_tokens),
            "kv_bytes": self.kv_bytes,
            "state_bytes": self.state_bytes,
            "full_kv_bytes": self.full_kv_bytes,
            "kv_share": self.kv_share,
        }


def estimate(
    policy: CachePolicy,
    shape: ModelShape,
    context_len: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Estimate:
    """Estimate the operations and bytes of one prompt under a policy, without running a model.

    A layer over ``n`` tokens takes ``2 * n`` operations for each of its weights, and causal
    attention ``n ** 2 * query_heads * (key_dim + value_dim)``: half of two full products of two
    operations each. A recurrent layer takes four for each number of its state and token. Norms,
    biases, activations, rotary embeddings and the policy's scoring are not counted.
    Numbers of tokens are rates of the prompt, not rounded, but not below the first and last tokens
    that a part says it always protects.

    Args:
        policy: The policy.
        shape: The model's sizes.
        context_len: Tokens of the prompt, at least 1.
        dtype: Of keys and values, and of states that are not in float32 anyway.

    Raises:
        TypeError: ``policy``, ``shape``, ``context_len`` or ``dtype`` is not of its type.
        ValueError: ``context_len`` is below 1, or a layer of the policy lies outside the model.

    Example:
        >>> from kvpolicy.evaluation import load_shape
        >>> from kvpolicy.policies import FastKV
        >>> found = estimate(FastKV(), load_shape("llama-3.1-8b"), 131072)
        >>> round(found.compute_rate, 2), round(found.speedup, 2), round(found.kv_share, 2)
        (0.6, 1.84, 0.1)

    Source: the operation count follows FastKV (arXiv 2502.01068), whose 8B model it allows
    1.70, 1.76 and 1.84 at 8, 32 and 128 times 1,024 tokens.
    """
    if not isinstance(policy, CachePolicy):
        raise TypeError(f"policy must be a CachePolicy, got {policy!r}")
    check_kind("shape", shape, ModelShape)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    check_count("context_len", context_len, minimum=1)
    policy = policy.placed(shape.num_layers, shape.eligible)
    policy.check_model(shape.num_layers)
    reached = policy.propagation.layer_rates(shape.num_layers, context_len)
    kept = policy.selector.kept_rates(shape.num_layers, context_len)
    arriving = _tokens(reached, policy.propagation, context_len)
    chosen = _tokens(kept, policy.selector, context_len)
    head = Flops(0.0, 0.0, 2.0 * shape.hidden_size * shape.vocab_size)
    by_content = policy.propagation.decides_by_content
    rate = None if by_content else policy.prefill_compute_rate(shape.num_layers, context_len)
    return Estimate(
        context_len=context_len,
        compute_rate=rate,
        prefill=_prefill(policy.propagation, shape, context_len)
        + _again(policy.rereading, shape, context_len)
        + head,
        full=_pass(shape, [context_len] * shape.num_layers, context_len) + head,
        kept_tokens=tuple(
            _kept(
                shape.layers[index],
                tokens,
                chosen[index],
                # A restart leaves no gaps between the tokens that it reads.
                tokens if policy.propagation.restarts else context_len,
            )
            for index, tokens in enumerate(arriving)
        ),
        token_bytes=tuple(layer.token_bytes(dtype.itemsize) for layer in shape.layers),
        state_bytes=sum(layer.state_bytes(dtype.itemsize) for layer in shape.layers),
    )


def layer_flops(
    shape: ModelShape, layer_idx: int, tokens: float, context_len: float | None = None
) -> Flops:
    """Return the operations of one layer over all tokens that reach it.

    So does a layer that drops: the one place to change if it computes fewer.

    Args:
        shape: The model's sizes.
        layer_idx: Index of the layer, from 0.
        tokens: Tokens that reach it.
        context_len: Tokens of the prompt that they are spread over, which windows are measured in;
            None where all reach it.
    """
    layer = shape.layers[layer_idx]
    context_len = tokens if context_len is None else context_len
    pairs = tokens**2 / 2 * _seen_share(layer, context_len)
    return Flops(
        linear=2 * tokens * layer.weights,
        attention=2 * pairs * layer.pair_width,
        states=4.0 * tokens * layer.state_elements,
    )


def _seen_share(layer: LayerShape, context_len: float) -> float:
    """Return the fraction of causal token pairs that lie within a layer's attention window."""
    window = layer.window
    if window is None or window >= context_len:
        return 1.0
    if layer.chunked:
        chunks, rest = divmod(context_len, window)
        return (chunks * window**2 + rest**2) / context_len**2
    return 1 - (1 - window / context_len) ** 2


def _pass(shape: ModelShape, tokens: Sequence[float], context_len: float) -> Flops:
    layers = (layer_flops(shape, index, count, context_len) for index, count in enumerate(tokens))
    return sum(layers, Flops(0.0, 0.0))


def _kept(layer: LayerShape, arriving: float, chosen: float, context_len: float) -> float:
    """Return how many of a layer's tokens are kept: the policy's choice, or the window's length."""
    if not layer.token_elements:
        return 0.0
    if layer.window is None or context_len <= layer.window:
        return min(arriving, chosen)
    return arriving * layer.held(context_len) / context_len


def _prefill(propagation: PropagationPolicy, shape: ModelShape, context_len: int) -> Flops:
    found = Flops(0.0, 0.0)
    for rates in propagation.prefill_passes(shape.num_layers, context_len):
        tokens = _tokens(rates, propagation, context_len)
        found += _pass(shape, tokens, max(tokens) if propagation.restarts else context_len)
    if propagation.restarts:
        # The choosing pass ends inside the acting layer, which `prefill_passes` counts as 0: it has
        # made queries, keys and values.
        acting = propagation.acting_layers(shape.num_layers)
        weights = sum(shape.layers[index].projection_weights for index in acting)
        found += Flops(2.0 * context_len * weights, 0.0)
    return found


def _again(reading: Repetition | None, shape: ModelShape, context_len: int) -> Flops:
    """Return the operations of reading the prompt a second time; zero if it is read once."""
    if reading is None:
        return Flops(0.0, 0.0)
    tokens = reading.compute_rate(context_len) * context_len
    seen = context_len + tokens / max(len(reading.spans(context_len)), 1) / 2
    found = Flops(0.0, 0.0)
    for layer in shape.layers:
        keys = seen if layer.window is None else min(layer.window, seen)
        found += Flops(
            linear=2 * tokens * layer.weights,
            attention=2 * tokens * keys * layer.pair_width,
            states=4.0 * tokens * layer.state_elements,
        )
    return found


def _tokens(
    rates: Sequence[float], part: KVSelector | PropagationPolicy, context_len: int
) -> list[float]:
    """Return how many tokens each layer reads or keeps, from rates; 0 for layers not run."""
    fewest = min(max(part.protected_tail + part.protected_first, 1), context_len)
    return [max(rate * context_len, fewest) if rate else 0.0 for rate in rates]
