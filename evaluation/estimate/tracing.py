"""Find what layers hold for a token, by reading two tokens on torch's `meta` device.

A configuration says the kind and window of a layer. How wide its keys, latents and states are, each
family says in its own words; so the model is built where tensors have a shape and no numbers, and
Transformers' own cache shows what it holds.
"""

import copy
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as without_numbers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.utils import logging

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation.estimate.model_shape import LayerShape
from kvpolicy.integrations.transformers.model.kinds import ChunkedAttention
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.surface import CACHE, cache_of

TOKENS = 2


def trace(config: Any, name: str, dtype: torch.dtype) -> tuple[tuple[LayerShape, ...], int]:
    """Return what each layer of a decoder holds, and the bytes of the model's weights.

    Of a model of several modalities the text decoder counts. It is an UnsupportedModelError if a
    policy cannot be applied to it, or it cannot be built or run without numbers.
    """
    config = copy.deepcopy(config)  # building a model changes its configuration
    text = config.get_text_config(decoder=True)
    try:
        with _without_numbers():
            model = _built(config, text, dtype)
            parts = ModelParts(model)
            if not parts.shows_queries:
                raise UnsupportedModelError(
                    f"{name} must attend by Transformers' AttentionInterface, but some of its "
                    "layers do not; describe it by a ModelShape"
                )
            given = None if parts.own_caches_only else DynamicCache(config=text)
            ids = torch.ones(1, TOKENS, dtype=torch.long, device="meta")
            output: Any = model(input_ids=ids, use_cache=True, **{CACHE: given})
    except UnsupportedModelError:
        raise
    except Exception as error:  # any error in a family's own code
        reason = f"{type(error).__name__}: {textwrap.shorten(str(error), 160)}"
        raise UnsupportedModelError(
            f"{name} must be a decoder that runs without weights, but its run ended in {reason}; "
            "describe it by a ModelShape"
        ) from error
    cache = cache_of(output) if given is None else given
    held = [*cache.layers, *[None] * parts.num_layers][: parts.num_layers]  # some hold nothing
    # Transformers holds position ids once for all layers, `PolicyCache` with each index key.
    ids_held = (getattr(cached, "indexer_position_ids", None) for cached in held)
    places = max((each.nbytes // TOKENS for each in ids_held if each is not None), default=0)
    found = []
    for index, (kind, cached) in enumerate(zip(parts.kinds, held, strict=True)):
        states = _states(cache, index, cached)
        layer = LayerShape(
            kind.name,
            token_bytes=_token_bytes(cached)
            + places * isinstance(getattr(cached, "indexer_keys", None), Tensor),
            state_bytes=sum(each.nbytes for each in states),
            state_elements=sum(each.numel() for each in states),
            window=kind.window,
            chunked=isinstance(kind, ChunkedAttention),
        )
        found.append(layer)
    return tuple(found), dtype.itemsize * sum(each.numel() for each in model.parameters())


def _built(config: Any, text: Any, dtype: torch.dtype) -> nn.Module:
    """Build a model on the `meta` device from its configuration, without weights."""
    makers: list[tuple[Any, Any]] = [
        (AutoModelForCausalLM, text),
        (AutoModelForImageTextToText, config),
        (AutoModel, text),
    ]
    known = (pair for pair in makers if type(pair[1]) in pair[0]._model_mapping)
    maker, made_of = next(known, makers[-1])
    model: Any = maker.from_config(made_of, dtype=dtype, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    built: nn.Module = model.eval()
    return built


@contextmanager
def _without_numbers() -> Iterator[None]:
    """Create tensors on `meta` in a ``with`` block, and warn of no missing kernels."""
    level, before = logging.get_verbosity(), without_numbers.meta_nonzero_assume_all_nonzero
    logging.set_verbosity_error()
    # Code that asks which numbers are not zero is told: all.
    without_numbers.meta_nonzero_assume_all_nonzero = True
    try:
        with torch.no_grad(), torch.device("meta"):
            yield
    finally:
        without_numbers.meta_nonzero_assume_all_nonzero = before
        logging.set_verbosity(level)


def _token_bytes(cached: Any) -> int:
    """Return how many bytes a layer holds for a token: keys, values and index keys."""
    names = ("keys", "values", "indexer_keys", "prefill_keys", "prefill_values")
    held = (getattr(cached, name, None) for name in names)
    return sum(each.nbytes // TOKENS for each in held if isinstance(each, Tensor))


def _states(cache: Any, index: int, cached: Any) -> list[Tensor]:
    """Return the recurrent and convolution states that a cache holds for a layer."""
    found: list[Any] = []
    for name in ("conv_states", "recurrent_states"):
        held = getattr(cached, name, None)
        if isinstance(held, dict):
            held = list(held.values())
        found += held if isinstance(held, (list, tuple)) else [held]
    # Some models define caches that hold states beside their layers.
    found += getattr(cache, "linear_cache", [])[index : index + 1]
    return [each for each in found if isinstance(each, Tensor)]
