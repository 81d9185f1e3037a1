"""Compute the final hidden state after a drop at each layer, without a full run for each.

One pass over the full context notes, at every candidate layer, which tokens a propagation policy
would pass on, and their hidden states. For each candidate, only the layers after it are then run,
on those tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.context import LayerContext
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.interfaces import PropagationPolicy, Scorer
from kvpolicy.policies import SinkAndRecentSelector
from kvpolicy.policy import CachePolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@attrs.frozen(eq=False)
class FinalStates:
    """The last token's final hidden states: with full context and with a drop after each layer.

    Args:
        full: ``[hidden_size]``, under full context.
        dropped: For every candidate layer from 0, the same under a drop after it.
    """

    full: Tensor
    dropped: tuple[Tensor, ...]


@torch.no_grad()
def final_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    scorer: Scorer,
    propagation: PropagationPolicy,
    max_layer: int,
) -> FinalStates:
    """Compute the last token's final hidden state for a drop after each candidate layer.

    This runs a full prefill, and then the layers after each candidate on the tokens that it passes
    on, with their own rotary positions and causal attention among them. Meanwhile the hidden states
    of these tokens are held in memory for every candidate.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: int64 ``[1, prompt_len]`` on the model's device.
        scorer: Gives the saliency.
        propagation: Asked at every candidate layer, whatever layers it names; one that drops.
        max_layer: The last candidate, a layer index.

    Raises:
        UnsupportedModelError: The model is not one that `PolicyCache` can be attached to, its
            output is not the norm of its last layer's, or its layers take arguments of which it is
            not known how to cut them to some of the tokens.
    """
    decoder = decoder_of(model)
    layers: list[nn.Module] = list(decoder.layers)
    full_pass = _FullPass(max_layer)
    full = full_pass.run(model, decoder, input_ids, scorer, propagation)
    _check_end(decoder, full_pass.last, full)
    dropped = []
    for candidate in range(max_layer + 1):
        passed = full_pass.passed[candidate]
        if passed is None:  # all tokens go on, so the full pass continues
            dropped.append(full)
            continue
        states = full_pass.states.pop(candidate)
        for index in range(candidate + 1, len(layers)):
            states = _states_of(layers[index](states, **_cut(full_pass.arguments[index], passed)))
        dropped.append(decoder.norm(states[:, -1:])[0, 0])
    return FinalStates(full, tuple(dropped))


@attrs.frozen(eq=False)
class _Watch(PropagationPolicy):
    """A propagation policy that records which tokens another policy would pass on, but drops none.

    Not a part for policies: it lives for one forward and holds what it noted.
    """

    propagation: PropagationPolicy
    max_layer: int
    passed: dict[int, Tensor | None]

    @property
    def needs_saliency(self) -> bool:
        return self.propagation.needs_saliency

    @property
    def protected_tail(self) -> int:
        return self.propagation.protected_tail

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        return frozenset(range(self.max_layer + 1))

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> None:
        passed = self.propagation.propagate(saliency, context)
        self.passed[context.layer_idx] = None if passed is None else passed[0]


class _FullPass:
    """A full-context forward pass that records the hidden states entering each candidate layer.

    Args:
        max_layer: The last candidate.

    Attributes:
        passed: For every candidate, the tokens it passes on, int64 ``[passed_len]``; None for all.
        states: For every candidate that drops, the hidden states of those tokens after it,
            ``[1, passed_len, hidden_size]``.
        arguments: For every layer, the keyword arguments of its call, without the cache.
        last: ``[1, 1, hidden_size]``, the last token's hidden state before the final norm.
    """

    last: Tensor

    def __init__(self, max_layer: int) -> None:
        self.max_layer = max_layer
        self.passed: dict[int, Tensor | None] = {}
        self.states: dict[int, Tensor] = {}
        self.arguments: dict[int, dict[str, Any]] = {}

    def run(
        self,
        model: PreTrainedModel,
        decoder: Any,
        input_ids: Tensor,
        scorer: Scorer,
        propagation: PropagationPolicy,
    ) -> Tensor:
        """Run the forward pass; return the last token's hidden state after the final norm."""
        from kvpolicy.integrations.transformers import PolicyCache  # slow to import

        # A prefill's output does not depend on the tokens kept for decoding, so keep almost none.
        keep_last = SinkAndRecentSelector(num_sinks=0, retention_tokens=1)
        watch = _Watch(propagation, self.max_layer, self.passed)
        cache = PolicyCache(CachePolicy(scorer, keep_last, watch))
        with cache.attached(model), self._noting(decoder.layers, cache):
            output = decoder(input_ids, use_cache=True, cache=cache)
        last: Tensor = output.last_hidden_state[0, -1].clone()
        return last

    @contextmanager
    def _noting(self, layers: nn.ModuleList, cache: object) -> Iterator[None]:
        def noter(index: int) -> Any:
            def note(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
                if any(each is cache for each in kwargs.values()):
                    _check_arguments(module, args, kwargs)
                    alone = {key: None if each is cache else each for key, each in kwargs.items()}
                    self._note(index, alone, _states_of(output))

            return note

        handles = [
            layer.register_forward_hook(noter(index), with_kwargs=True)
            for index, layer in enumerate(layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, index: int, kwargs: dict[str, Any], states: Tensor) -> None:
        self.arguments[index] = kwargs
        passed = self.passed.get(index)
        if passed is not None:
            # A copy, so that the states of dropped tokens are freed with the pass.
            self.states[index] = states.index_select(1, passed.to(states.device))
        self.last = states[:, -1:].clone()


def decoder_of(model: Any) -> Any:
    """Return the model's decoder module, which has ``layers`` and a ``norm`` after them.

    Raises:
        UnsupportedModelError: The model has no such decoder.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module):
        raise UnsupportedModelError(
            "model must have get_decoder() with layers and a norm after them, whose output is "
            f"compared, got {type(model).__name__}"
        )
    return decoder


def _states_of(output: Any) -> Tensor:
    """Return the hidden states from a decoder layer's output, a tensor or a tuple."""
    states = output[0] if isinstance(output, tuple) else output
    assert isinstance(states, Tensor)
    return states


def _check_end(decoder: Any, last: Tensor, full: Tensor) -> None:
    """Check that a decoder's output is just the final norm of its last layer's output."""
    difference = (decoder.norm(last)[0, 0] - full).float().norm()
    if difference > 0.01 * full.float().norm():
        raise UnsupportedModelError(
            f"model must return the norm of its last layer's output, but {type(decoder).__name__} "
            "does more after its layers"
        )


# The arguments of a layer that have an axis of tokens, and are cut along it.
_CUT = ("attention_mask", "position_ids", "position_embeddings")


def _check_arguments(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that a layer was called with hidden states and only those tensors that `_cut` knows."""
    unknown = [str(index) for index in range(1, len(args))]
    unknown += [
        name
        for name, value in kwargs.items()
        if name not in (*_CUT, "hidden_states") and isinstance(value, (Tensor, tuple, list, dict))
    ]
    if unknown:
        raise UnsupportedModelError(
            f"layers of the model must take no tensors but hidden_states, {', '.join(_CUT)}, but "
            f"{type(layer).__name__} is called with {', '.join(unknown)}; its layer cannot be "
            "chosen by calibration yet"
        )


def _cut(arguments: dict[str, Any], passed: Tensor) -> dict[str, Any]:
    """Return a decoder layer's call arguments with only the tokens in ``passed`` left."""
    cut = {name: value for name, value in arguments.items() if name != "hidden_states"}
    for name in {"position_ids", "position_embeddings"} & cut.keys():
        cut[name] = _columns(cut[name], passed)
    mask = cut.get("attention_mask")
    if mask is not None:  # [batch or 1, heads or 1, query_len, key_len]
        index = passed.to(mask.device)
        cut["attention_mask"] = mask.index_select(2, index).index_select(3, index)
    return cut


def _columns(value: Any, passed: Tensor) -> Any:
    """Select the tokens ``passed`` along axis 1 of a tensor, or of each tensor in a tuple."""
    if isinstance(value, tuple):
        return tuple(_columns(part, passed) for part in value)
    return None if value is None else value.index_select(1, passed.to(value.device))
