"""The meeting of a cache and its model in a stock `model.generate`."""

from __future__ import annotations

import copy
import functools
import threading
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode

from kvpolicy.errors import UnsupportedGenerationError

if TYPE_CHECKING:
    from kvpolicy.integrations.transformers.cache import PolicyCache

_lock = threading.Lock()


def wrap_generate() -> None:
    """Wrap `GenerationMixin.generate`, once, so that a policy cache is attached while it runs.

    `generate` tells a user's cache nothing of the model it is for, and no other public place does.
    Calls without a policy cache pass straight through.
    """
    with _lock:
        original = GenerationMixin.generate
        if hasattr(original, "_kvpolicy_wraps"):
            return

        @functools.wraps(original)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            from kvpolicy.integrations.transformers.cache import PolicyCache

            cache = kwargs.get("past_key_values")
            if not isinstance(cache, PolicyCache):
                return original(self, *args, **kwargs)
            check_generation(self, cache, args, kwargs)
            with cache.attached(self), cache.new_turn():
                return original(self, *args, **kwargs)

        generate._kvpolicy_wraps = original  # type: ignore[attr-defined]
        GenerationMixin.generate = generate


def check_generation(
    model: Any, cache: PolicyCache, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Check a call of `generate` before anything is computed.

    Raises:
        UnsupportedGenerationError: A mode that would be wrong with a policy.
        ValueError: The inputs do not go on from what the cache has seen.
    """
    if kwargs.get("custom_generate") is not None:
        raise UnsupportedGenerationError(
            "custom_generate must be None with a PolicyCache; attach the cache yourself: "
            "`with cache.attached(model):`"
        )
    config = _effective_config(model, args, kwargs)
    mode = config.get_generation_mode(kwargs.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedGenerationError(
            f"generation mode must be greedy_search or sample with a PolicyCache, got "
            f"{mode.value}; others are not supported yet"
        )
    if config.prefill_chunk_size is not None:
        raise UnsupportedGenerationError(
            f"prefill_chunk_size must be None with a PolicyCache, got {config.prefill_chunk_size}; "
            "the policy acts on the prompt as a whole"
        )
    if kwargs.get("use_cache", config.use_cache) is False:
        raise UnsupportedGenerationError("use_cache must be True with a PolicyCache, got False")
    _check_continuation(cache, args, kwargs)


def _effective_config(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The configuration `generate` will arrive at: arguments, then given, then the model's."""
    config = copy.deepcopy(model.generation_config)
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    for source in (given.to_dict() if isinstance(given, GenerationConfig) else {}, kwargs):
        known = {name: value for name, value in source.items() if hasattr(config, name)}
        config.update(**{name: value for name, value in known.items() if value is not None})
    assert isinstance(config, GenerationConfig)
    return config


def _check_continuation(cache: PolicyCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    seen = cache.get_seq_length()
    embeds = kwargs.get("inputs_embeds")
    given = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    name, given = ("input_ids", given) if embeds is None else ("inputs_embeds", embeds)
    if not seen or not isinstance(given, Tensor) or given.ndim < 2:
        return
    mask = kwargs.get("attention_mask")
    length = given.shape[1]
    if embeds is None and isinstance(mask, Tensor) and mask.ndim == 2:
        length = mask.shape[1]
    whole = embeds is None or not isinstance(mask, Tensor) or mask.shape[1:2] == given.shape[1:2]
    if length <= seen or not whole:
        raise ValueError(
            f"{name} must continue the {seen} tokens the cache has seen, got {given.shape[1]}; "
            "pass the whole conversation, or (as input_ids) the new tokens with an "
            "attention_mask over the whole conversation, or reset() the cache"
        )
