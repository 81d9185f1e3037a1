"""`PolicyCache`: any policy inside a stock `model.generate`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import Cache

from kvpolicy.errors import (
    NotAttachedError,
    UnsupportedGenerationError,
    UnsupportedModelError,
)
from kvpolicy.integrations.transformers import routing
from kvpolicy.integrations.transformers.attachment import Attachment, ModelParts
from kvpolicy.integrations.transformers.forward import Forward
from kvpolicy.integrations.transformers.generation import wrap_generate
from kvpolicy.integrations.transformers.inputs import read_inputs
from kvpolicy.integrations.transformers.layer import PolicyLayer, State
from kvpolicy.integrations.transformers.report import CacheReport
from kvpolicy.integrations.transformers.restart import FilterPass
from kvpolicy.integrations.transformers.tokens import SeenTokens
from kvpolicy.policy import CachePolicy


class PolicyCache(Cache):  # type: ignore[misc]
    """A Transformers cache that applies a policy while the model reads a prompt.

    Give it to ``model.generate(..., past_key_values=cache)``; in a hand-written loop, call the
    model inside ``with cache.attached(model):``. The policy acts on the first forward and on the
    first forward of every later ``generate`` with the same cache (a new turn; `start_turn` in a
    hand-written loop). Any other forward, such as one decoded token, only appends.

    Args:
        policy: Which tokens to keep.

    Attributes:
        policy: The policy.
        layers: What each layer holds: ``.keys`` and ``.values`` ``[batch, kv_heads, kept_len,
            head_dim]`` and ``.positions`` ``[batch, kv_heads, kept_len]``, -1 on empty slots.
        propagated: For every layer that dropped tokens in the last prompt, the positions it passed
            on: ``[batch, passed_len]`` int64, -1 on empty slots.

    Raises:
        TypeError: ``policy`` is not a `CachePolicy`.

    Where a policy drops tokens, a prompt's logits and hidden states are those of the tokens that
    went on, the last token always among them.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from kvpolicy.policies import SnapKV
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        ...     eos_token_id=None)
        >>> model = LlamaForCausalLM(config).eval()
        >>> cache = PolicyCache(SnapKV(retention_tokens=12))
        >>> prompt = torch.arange(40)[None]
        >>> tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=4)
        >>> cache.get_seq_length(), cache.layers[0].keys.shape
        (43, torch.Size([1, 1, 15, 8]))
    """

    def __init__(self, policy: CachePolicy) -> None:
        if not isinstance(policy, CachePolicy):
            hint = f"{policy.__name__}()" if isinstance(policy, type) else "kvpolicy.build(name)"
            raise TypeError(f"policy must be a CachePolicy, got {policy!r}; pass {hint}")
        super().__init__(layers=[])
        self.policy = policy
        self.propagated: dict[int, Tensor] = {}
        self._tokens: SeenTokens | None = None
        self._attachment: Attachment | None = None
        self._forward: Forward | None = None
        self._before: list[State] = []
        self._starts_turn = False
        self._filled_by: weakref.ref[nn.Module] | None = None

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[PolicyCache]:
        """Let the policy reach a model; after the block the model is as it was.

        Args:
            model: A decoder-only model of Transformers. Attaching again to the same model inside
                the block does nothing.

        Raises:
            UnsupportedModelError: The policy cannot be applied to the model; says why.
            ValueError: A layer of the policy lies outside the model, or the cache belongs to
                another model.
        """
        parts = ModelParts(model)
        if self._attachment is not None:
            if self._attachment.parts.decoder is not parts.decoder:
                raise ValueError("model must be the one the cache is attached to, got another one")
            try:
                with self._attachment.watching(model):
                    yield self
            finally:
                self.abandon_forward()
            return
        self.policy.check_model(parts.num_layers)
        self._check_filled_by(parts)
        self._attachment = Attachment(self, parts)
        try:
            self._attachment.attach()
            yield self
        finally:
            self._attachment.detach()
            self._attachment = None
            self.abandon_forward()

    def _check_filled_by(self, parts: ModelParts) -> None:
        if self._tokens is None:
            self.layers[:] = [PolicyLayer() for _ in range(parts.num_layers)]
        elif len(self.layers) != parts.num_layers:
            raise ValueError(
                f"model must have the {len(self.layers)} layers of the model that filled the "
                f"cache, got one with {parts.num_layers}; use a new PolicyCache"
            )
        elif self._filled_by is not None and self._filled_by() is not parts.decoder:
            raise ValueError(
                "model must be the one that filled the cache, got another one; use a new "
                "PolicyCache or reset() this one"
            )

    def start_turn(self) -> None:
        """Let the policy act on the next forward: a new turn begins in a hand-written loop."""
        self.abandon_forward()
        self._starts_turn = True

    @contextmanager
    def new_turn(self) -> Iterator[None]:
        """Start a turn that is off again after the block if no forward took it up."""
        before = self._starts_turn
        self.start_turn()
        try:
            yield
        finally:
            self._starts_turn = self._starts_turn and before

    def report(self) -> CacheReport:
        """Tokens and bytes held against what a full cache would hold; prints as a table."""
        return CacheReport.of(self)

    @property
    def seen_lengths(self) -> tuple[int, ...]:
        """For each row, the tokens seen, padding not counted."""
        return () if self._tokens is None else tuple(self._tokens.lengths.tolist())

    # What the hooks call.

    @property
    def acts_next(self) -> bool:
        """Whether the policy acts on the next forward."""
        return self._tokens is None or self._starts_turn

    @property
    def may_drop(self) -> bool:
        """Whether the next forward may drop tokens."""
        return self.acts_next and bool(self.policy.propagation.acting_layers(len(self.layers)))

    @property
    def forward(self) -> Forward:
        """The forward under way."""
        if self._forward is None:
            raise NotAttachedError(
                "a decoder layer was called with a PolicyCache outside its model's forward; call "
                "the model itself inside `with cache.attached(model):`"
            )
        return self._forward

    def begin_forward(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Take up a forward of the decoder; returns the arguments to run it with.

        Raises:
            TypeError: See `read_inputs`.
            ValueError: See `read_inputs`.
            UnsupportedModelError: The context exceeds the model's sliding window.
        """
        assert self._attachment is not None
        parts = self._attachment.parts
        self.abandon_forward()
        acts, implementation = self.acts_next, parts.implementation
        incoming = read_inputs(arguments, self._tokens, acts=acts)
        parts.check_context(incoming.tokens.seen + incoming.new_valid.shape[1])
        self._before = [layer.state() for layer in self.layers]
        propagated: dict[int, Tensor] = {}
        if acts and self.policy.propagation.restarts:
            first = FilterPass(self.policy, self.layers, incoming, implementation)
            self._forward = first
            incoming, propagated = first.run(parts.decoder), first.propagated
        self._forward = Forward(
            self.policy,
            self.layers,
            incoming,
            acts=acts,
            implementation=implementation,
        )
        self._forward.propagated.update(propagated)
        return incoming.arguments

    def finish_forward(self, output: Any) -> Any:
        """Make what the forward did the cache's state; returns the decoder's output.

        Raises:
            UnsupportedModelError: A layer did not use the cache.
        """
        forward = self.forward
        try:
            self._tokens = forward.finish()
        except UnsupportedModelError:
            self.abandon_forward()
            raise
        assert self._attachment is not None
        self._filled_by = weakref.ref(self._attachment.parts.decoder)
        if forward.acts:
            self.propagated = forward.propagated
            self._starts_turn = False
        self._forward, self._before = None, []
        return forward.in_order(output)

    def abandon_forward(self) -> None:
        """Undo a forward that did not come to its end; without one, do nothing."""
        if self._forward is not None:
            for layer, state in zip(self.layers, self._before, strict=True):
                layer.restore(state)
            routing.waiting.set(None)
        self._forward, self._before = None, []

    # What Transformers asks of a cache.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values; return all that its attention is to see.

        Raises:
            NotAttachedError: The cache is not attached to the model that calls.
        """
        if self._forward is None:
            raise NotAttachedError(
                "cache must be attached to the model for its policy to act: use "
                "model.generate(past_key_values=cache), or call the model inside "
                "`with cache.attached(model):`"
            )
        if self._forward.acts:
            routing.waiting.set((self._forward, layer_idx))
        return self._forward.update(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included; what is stored is ``layers[i].kept_len``."""
        return 0 if self._tokens is None else self._tokens.seen

    @property
    def batch_size(self) -> int:
        """Rows, -1 before the first forward."""
        return -1 if self._tokens is None else self._tokens.batch

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Take back tokens that were appended since the policy last acted.

        Args:
            tokens_to_remove: Minus their number, as in Transformers.

        Raises:
            TypeError: It is no int.
            ValueError: It is positive, or more than were appended: what the policy evicted from
                a prompt cannot be brought back.
        """
        if isinstance(tokens_to_remove, bool) or not isinstance(tokens_to_remove, int):
            raise TypeError(f"tokens_to_remove must be an int, got {tokens_to_remove!r}")
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be 0 or negative, got {tokens_to_remove}")
        self.abandon_forward()
        count = -tokens_to_remove
        appended = 0 if self._tokens is None else self._tokens.appended.shape[1]
        if count > appended:
            raise ValueError(
                f"tokens_to_remove must be at least {-appended}: only {appended} tokens were "
                f"appended since the policy acted, got {tokens_to_remove}"
            )
        if count and self._tokens is not None:
            self._tokens = self._tokens.without_last(count)
            for layer in self.layers:
                layer.drop_last(count)
                layer.follow(self._tokens)

    def reset(self) -> None:
        """Forget everything: the next forward reads a first prompt."""
        self.abandon_forward()
        for layer in self.layers:
            layer.reset()
        self.propagated = {}
        self._tokens = None
        self._starts_turn = False

    def __getstate__(self) -> dict[str, Any]:
        """All but what binds the cache to a model: a copy is attached to nothing."""
        # A forward under way, or one that was interrupted, is not part of the copy.
        held = self._before or [layer.state() for layer in self.layers]
        layers = [PolicyLayer() for _ in held]
        for layer, each in zip(layers, held, strict=True):
            layer.restore(each)
        state = {**self.__dict__, "layers": layers, "propagated": dict(self.propagated)}
        state.update(_attachment=None, _forward=None, _before=[], _filled_by=None)
        return state

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Raise: rows cannot be reordered yet."""
        raise _rows_unsupported("reorder_cache (beam search)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raise: rows cannot be repeated yet."""
        raise _rows_unsupported("batch_repeat_interleave")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Raise: rows cannot be selected yet."""
        raise _rows_unsupported("batch_select_indices")


def _rows_unsupported(operation: str) -> UnsupportedGenerationError:
    return UnsupportedGenerationError(
        f"{operation} is not supported by PolicyCache yet; generate greedily or by sampling"
    )


# On import, not when the first cache is built: Python looks `generate` up before it builds the
# cache in `model.generate(past_key_values=PolicyCache(...))`.
wrap_generate()
