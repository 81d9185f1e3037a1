"""Estimate a policy's cost without a run: prefill compute, and the bytes that a cache holds."""

from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.checks import check_count, check_kind
from kvpolicy.decoding import DecodingEviction
from kvpolicy.evaluation.estimate.model_shape import LayerShape, ModelShape
from kvpolicy.interfaces import KVSelector, PropagationPolicy
from kvpolicy.policy import CachePolicy


@attrs.frozen
class Estimate:
    """What one prompt and its answer cost under a policy, and with full context.

    Args:
        context_len: Tokens of the prompt.
        answer_len: Tokens of the answer.
        weight_bytes: Bytes of the model's weights.
        compute_rate: Layer-tokens computed in prefill over those of a full prefill, the paper's
            figure. None if the policy decides by content how many tokens go on, which is known only
            once a prompt is read: then ``kept_tokens`` are the most.
        kept_tokens: For each layer, the tokens it holds after the prompt, the mean over its KV
            heads; 0 if it holds nothing for a token. ``answered_tokens``: after the answer.
        token_bytes: For each layer, the bytes of one token's keys and values, or latent.
        state_bytes: Bytes of all layers' states, which no policy cuts.
    """

    context_len: int
    answer_len: int
    weight_bytes: int
    compute_rate: float | None
    kept_tokens: tuple[float, ...]
    answered_tokens: tuple[float, ...]
    token_bytes: tuple[int, ...]
    state_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        """The bytes of keys, values and recurrent states held after the prompt."""
        return self._held(self.kept_tokens)

    @property
    def answered_kv_bytes(self) -> int:
        """The bytes of keys, values and recurrent states held after the answer."""
        return self._held(self.answered_tokens)

    @property
    def full_kv_bytes(self) -> int:
        """The bytes of a cache that holds the whole prompt in every layer, windows or not."""
        return self.context_len * sum(self.token_bytes) + self.state_bytes

    @property
    def kv_share(self) -> float:
        """The bytes held after the prompt, as a fraction of `full_kv_bytes`."""
        return self.kv_bytes / self.full_kv_bytes

    @property
    def mean_kept(self) -> float:
        """The tokens that a layer holds after the prompt, the mean over layers that hold any."""
        pairs = zip(self.kept_tokens, self.token_bytes, strict=True)
        holding = [tokens for tokens, size in pairs if size]
        return sum(holding) / len(holding)

    def as_data(self) -> dict[str, Any]:
        """Return the estimate as a dict for JSON; a rate that depends on the prompt is None."""
        return {
            "prefill_compute_rate": self.compute_rate,
            "kept_tokens": list(self.kept_tokens),
            "kv_bytes": self.kv_bytes,
            "kv_share": self.kv_share,
            "full_kv_bytes": self.full_kv_bytes,
            "state_bytes": self.state_bytes,
            "answered_tokens": list(self.answered_tokens),
            "answered_kv_bytes": self.answered_kv_bytes,
        }

    def _held(self, tokens: Sequence[float]) -> int:
        pairs = zip(tokens, self.token_bytes, strict=True)
        return round(sum(count * size for count, size in pairs)) + self.state_bytes


def estimate_cost(
    policy: CachePolicy, shape: ModelShape, context_len: int, *, answer_len: int = 0
) -> Estimate:
    """Estimate what one prompt and its answer cost under a policy, without running a model.

    Numbers of tokens are rates of the prompt, not rounded, but not below the first and last tokens
    that a part says it always protects.

    Args:
        policy: The policy.
        shape: The model's sizes.
        context_len: Tokens of the prompt, at least 1.
        answer_len: Tokens of the answer that are read into the cache. Of those that ``generate``
            returns, the last is not.

    Raises:
        TypeError: ``policy``, ``shape``, ``context_len`` or ``answer_len`` is not of its type.
        ValueError: ``context_len`` is below 1, ``answer_len`` below 0, or a layer of the policy
            lies outside the model.

    Example:
        >>> from kvpolicy.evaluation import load_shape
        >>> from kvpolicy.policies import FastKV
        >>> found = estimate_cost(FastKV(), load_shape("llama-3.1-8b"), 131072)
        >>> round(found.compute_rate, 2), found.kv_bytes, round(found.kv_share, 2)
        (0.6, 1717986918, 0.1)
    """
    if not isinstance(policy, CachePolicy):
        raise TypeError(f"policy must be a CachePolicy, got {policy!r}")
    check_kind("shape", shape, ModelShape)
    check_count("context_len", context_len, minimum=1)
    check_count("answer_len", answer_len, minimum=0)
    policy = policy.placed(shape.num_layers, shape.eligible)
    policy.check_model(shape.num_layers)
    propagation, selector = policy.propagation, policy.selector
    rates = propagation.layer_rates(shape.num_layers, context_len)
    arriving = _tokens(rates, propagation, context_len)
    rates = selector.kept_rates(shape.num_layers, context_len)
    chosen = _tokens(rates, selector, context_len)
    kept = tuple(
        # A restart leaves no gaps between the tokens that it reads.
        _kept(layer, tokens, most, tokens if propagation.restarts else context_len)
        for layer, tokens, most in zip(shape.layers, arriving, chosen, strict=True)
    )
    by_content = propagation.decides_by_content
    return Estimate(
        context_len=context_len,
        answer_len=answer_len,
        weight_bytes=shape.weight_bytes,
        compute_rate=(
            None if by_content else policy.prefill_compute_rate(shape.num_layers, context_len)
        ),
        kept_tokens=kept,
        answered_tokens=_answered(kept, policy.decoding, shape, context_len, answer_len),
        token_bytes=tuple(layer.token_bytes for layer in shape.layers),
        state_bytes=sum(layer.state_bytes for layer in shape.layers),
    )


def _kept(layer: LayerShape, arriving: float, chosen: float, context_len: float) -> float:
    """Return how many of a layer's tokens are kept: the policy's choice, or the window's length."""
    if not layer.token_bytes:
        return 0.0
    if layer.window is None or context_len <= layer.window:
        return min(arriving, chosen)
    # Those that reach it are counted as spread evenly over the prompt.
    return arriving * layer.held(context_len) / context_len


def _answered(
    kept: Sequence[float],
    rule: DecodingEviction | None,
    shape: ModelShape,
    context_len: int,
    answer_len: int,
) -> tuple[float, ...]:
    """Return how many tokens each layer holds after an answer.

    Layers append all tokens of an answer, those with windows too. Under a rule, all evict whenever
    its interval has passed.
    """
    evicted = 0 if rule is None else answer_len // rule.every * rule.every
    seen = context_len + evicted
    most = [float(seen)] * shape.num_layers
    if rule is not None and evicted:
        rates = rule.selector.kept_rates(shape.num_layers, seen)
        most = _tokens(rates, rule.selector, seen)
        for index, layer in enumerate(shape.layers):
            if layer.window is not None and layer.window < seen:
                most[index] = layer.held(seen)
    return tuple(
        min(tokens + evicted, limit) + answer_len - evicted if layer.token_bytes else 0.0
        for layer, tokens, limit in zip(shape.layers, kept, most, strict=True)
    )


def _tokens(
    rates: Sequence[float], part: KVSelector | PropagationPolicy, context_len: int
) -> list[float]:
    """Return how many tokens each layer reads or keeps, from rates; 0 for layers not run."""
    fewest = min(max(part.protected_tail + part.protected_first, 1), context_len)
    return [max(rate * context_len, fewest) if rate else 0.0 for rate in rates]
