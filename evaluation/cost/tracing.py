"""Find the shapes of a model's layers by running two tokens on torch's `meta` device.

The model is built on PyTorch's `meta` device, where tensors have a shape and nothing else, so that
one of hundreds of gigabytes takes no memory and well under a second. Nothing here knows a family:
linear layers say how often a token is multiplied with them, attention functions what they are
given, and Transformers' own cache what it holds.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as without_numbers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
)
from transformers.utils import logging

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation.cost.model_shape import LayerShape
from kvpolicy.integrations.transformers.model.finding import (
    attending_in_turn,
    find_decoder,
    layers_within,
    stateful_parts,
    takes_own_caches_only,
)
from kvpolicy.integrations.transformers.model.kinds import check_kinds, kinds_of
from kvpolicy.integrations.transformers.surface import (
    ATTN_IMPLEMENTATION,
    CACHE,
    cache_of,
    eager_mask,
)

NAME = "kvpolicy_shapes"
TOKENS = 2
# The model's precision; states in another precision keep it whatever the model's is.
DTYPE = torch.bfloat16


def trace_layers(config: Any, name: str) -> tuple[LayerShape, ...]:
    """Run a decoder on the `meta` device and return every layer's sizes.

    Args:
        config: The model's configuration; of one of several modalities the text decoder counts.
        name: What to call it in messages.

    Raises:
        UnsupportedModelError: Transformers cannot make or run it so, its attention is its own, or
            it has layers of a kind that no policy can be applied to.
    """
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    config = copy.deepcopy(config)  # building a model changes its configuration
    text = config.get_text_config(decoder=True)
    try:
        model = _built(config, text)
        decoder = find_decoder(model)
        layers = layers_within(decoder)
        if layers == attending_in_turn(decoder):
            raise UnsupportedModelError("its layers attend several times each")
        given = None if takes_own_caches_only(decoder) else DynamicCache(config=text)
        seen = _Seen(layers)
        ids = torch.ones(1, TOKENS, dtype=torch.long, device="meta")
        with torch.no_grad(), seen.watching(), quiet():
            output = model(input_ids=ids, use_cache=True, **{CACHE: given})
    except Exception as error:  # any error in a family's own code
        reason = f"{type(error).__name__}: {textwrap.shorten(str(error), 160)}"
        raise UnsupportedModelError(
            f"{name} must be a decoder that runs without weights, but its run ended in {reason}; "
            "describe it by a ModelShape"
        ) from error
    check_kinds(kinds_of(text, len(layers)))
    cache = cache_of(output) if given is None else given
    held = [*cache.layers, *[None] * len(layers)][: len(layers)]  # some may hold nothing
    places = _place_bytes(held)
    found = tuple(
        _layer(facts, cached, _states(cache, index, cached), places, *_window(text, index, cached))
        for index, (facts, cached) in enumerate(zip(seen.layers, held, strict=True))
    )
    if not any(layer.token_elements for layer in found):
        raise UnsupportedModelError(
            f"{name} must have layers that hold keys and values, but none does; a policy has "
            "nothing to choose there"
        )
    if any(layer.token_elements and not layer.query_heads for layer in found):
        raise UnsupportedModelError(
            f"{name} must attend by Transformers' AttentionInterface, but some of its layers do "
            "not; describe it by a ModelShape"
        )
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Transformers' warnings about missing kernels in a ``with`` block."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _built(config: Any, text: Any) -> nn.Module:
    """Build a model on the `meta` device from its configuration, without weights."""
    options = {"dtype": DTYPE, "attn_implementation": NAME}
    model: Any
    with torch.device("meta"):
        if type(text) in AutoModelForCausalLM._model_mapping:
            model = AutoModelForCausalLM.from_config(text, **options)
        elif type(text) in AutoModel._model_mapping:
            model = AutoModel.from_config(text, **options)
        else:
            # A vision tower may accept only the attention names that it knows.
            options["attn_implementation"] = "eager"
            model = AutoModelForImageTextToText.from_config(config, **options)
            setattr(model.config.get_text_config(decoder=True), ATTN_IMPLEMENTATION, NAME)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    built: nn.Module = model.eval()
    return built


@attrs.define
class _LayerFacts:
    """What is recorded about one decoder layer while it runs: weights used and head sizes."""

    linear: float = 0.0
    projection: float | None = None
    owned: int = 0
    heads: tuple[int, int, int, int] = (0, 0, 0, 0)


@attrs.define
class _Seen:
    """Records the decoder layers that run, with the weights they use.

    Args:
        modules: The decoder's layers.
    """

    modules: list[nn.Module]
    layers: list[_LayerFacts] = attrs.field(init=False)
    current: _LayerFacts | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.layers = [_LayerFacts(owned=_owned_weights(layer)) for layer in self.modules]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the decoder layers that run in a ``with`` block, by forward hooks."""
        handles = []
        for layer, facts in zip(self.modules, self.layers, strict=True):
            handles.append(layer.register_forward_pre_hook(self._enter(facts)))
            handles.append(layer.register_forward_hook(self._leave))
        inner = {id(each): each for layer in self.modules for each in layer.modules()}
        for module in inner.values():
            if isinstance(module, nn.Linear):
                handles.append(module.register_forward_hook(self._linear))
            elif _expert_weights(module):
                handles.append(module.register_forward_hook(self._experts, with_kwargs=True))
        for part in (part for layer in self.modules for part in stateful_parts(layer, None)):
            handles.append(part.register_forward_pre_hook(_all_keys_are_there))
            handles.append(part.register_forward_hook(_not_all_is_there))
        token, before = _watching.set(self), without_numbers.meta_nonzero_assume_all_nonzero
        _not_all_is_there()
        try:
            yield
        finally:
            without_numbers.meta_nonzero_assume_all_nonzero = before
            _watching.reset(token)
            for handle in handles:
                handle.remove()

    def _enter(self, facts: _LayerFacts) -> Any:
        def enter(*_: Any) -> None:
            self.current = facts

        return enter

    def _leave(self, *_: Any) -> None:
        self.current = None

    def _linear(self, module: nn.Linear, inputs: tuple[Tensor, ...], _: Any) -> None:
        if self.current is not None:
            rows = inputs[0].numel() // module.in_features
            self.current.linear += module.weight.numel() * rows / TOKENS

    def _experts(
        self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], _: Any
    ) -> None:
        """Forward hook that counts the weights of the experts that a token is routed to."""
        if self.current is None:
            return
        given = [each for each in (*inputs, *named.values()) if isinstance(each, Tensor)]
        chosen = [each.shape[-1] for each in given if not each.is_floating_point()]
        config: Any = getattr(module, "config", None)
        active = chosen[0] if chosen else getattr(config, "num_experts_per_tok", None) or 1
        for weight in _expert_weights(module):
            self.current.linear += active * weight[0].numel()

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Record the head sizes from one call of a layer's attention function."""
        if self.current is not None:
            heads = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
            self.current.heads = heads
            if self.current.projection is None:
                self.current.projection = self.current.linear


def _all_keys_are_there(*_: Any) -> None:
    """Forward hook after which ``nonzero`` returns every entry of a `meta` tensor."""
    without_numbers.meta_nonzero_assume_all_nonzero = True


def _not_all_is_there(*_: Any) -> None:
    """Forward hook that undoes `_all_keys_are_there`: ``nonzero`` on `meta` fails again."""
    without_numbers.meta_nonzero_assume_all_nonzero = False


_watching: ContextVar[_Seen] = ContextVar("watching")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Attention function that records its input tensors and returns an empty output."""
    _watching.get().attended(query, key, value)
    batch, heads, tokens, _dim = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


def _expert_weights(module: nn.Module) -> list[Tensor]:
    """Return a module's weight tensors that hold one matrix per expert."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return []
    own = dict(module.named_parameters(recurse=False))
    return [each for name, each in own.items() if each.ndim == 3 and not name.endswith("bias")]


def _owned_weights(layer: nn.Module) -> int:
    """Count a layer's weights outside linear layers, such as an MoE router's and convolutions'."""
    found = 0
    for module in layer.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        convolution = isinstance(module, nn.Conv1d)
        for name, weight in module.named_parameters(recurse=False):
            if not name.endswith("bias") and weight.ndim == (3 if convolution else 2):
                found += weight.numel()
    return found


def _layer(
    facts: _LayerFacts,
    cached: Any,
    states: list[Tensor],
    place_bytes: int,
    window: int | None,
    chunked: bool,
) -> LayerShape:
    query_heads, kv_heads, key_dim, value_dim = facts.heads
    return LayerShape(
        weights=max(round(facts.linear) + facts.owned, 1),
        projection_weights=round(facts.projection or 0.0),
        query_heads=query_heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        token_elements=_token_elements(cached),
        place_bytes=place_bytes * isinstance(getattr(cached, "indexer_keys", None), Tensor),
        state_elements=sum(each.numel() for each in states),
        float_state_elements=sum(each.numel() for each in states if each.dtype != DTYPE),
        window=window,
        chunked=chunked,
    )


def _token_elements(cached: Any) -> int:
    """Return how many numbers a layer caches per token: keys, values and index keys."""
    names = ("keys", "values", "indexer_keys", "prefill_keys", "prefill_values")
    held = (getattr(cached, name, None) for name in names)
    return sum(each.numel() // TOKENS for each in held if isinstance(each, Tensor))


def _place_bytes(held: list[Any]) -> int:
    """Return the bytes of position ids that a `PolicyCache` stores with each index key.

    Transformers' own cache holds them once, for the layers of all; where some are dropped on the
    way, layers hold different tokens.
    """
    given = (getattr(cached, "indexer_position_ids", None) for cached in held)
    return max((each.nbytes // TOKENS for each in given if isinstance(each, Tensor)), default=0)


def _states(cache: Any, index: int, cached: Any) -> list[Tensor]:
    """Return the recurrent and convolution states that a cache stores for a layer."""
    found: list[Any] = []
    for name in ("conv_states", "recurrent_states"):
        held = getattr(cached, name, None)
        if isinstance(held, dict):
            held = list(held.values())
        found += held if isinstance(held, (list, tuple)) else [held]
    # Some models define caches that hold states beside their layers.
    found += getattr(cache, "linear_cache", [])[index : index + 1]
    return [each for each in found if isinstance(each, Tensor)]


def _window(config: Any, index: int, cached: Any) -> tuple[int | None, bool]:
    """Return a layer's attention window (None for all) and whether windows are separate chunks."""
    kinds = getattr(config, "layer_types", None)
    own = getattr(cached, "sliding_window", None)
    if not kinds or index >= len(kinds):
        return own, False
    if kinds[index] == "chunked_attention":
        return config.attention_chunk_size, True
    # A layer that uses another layer's keys has no window of its own in the cache.
    return config.sliding_window if kinds[index] == "sliding_attention" else own, False
