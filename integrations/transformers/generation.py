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

# Their `prepare_inputs_for_generation` changes rotary factors, and drops the cache, at a length.
GIVE_UP_CACHE = ("phi3", "phimoe")

# Contrastive search, DoLa, and group or constrained beams live outside of Transformers by now, as
# `custom_generate` code that handles caches by itself.
MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)


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
            prompt_end = check_generation(self, cache, args, kwargs)
            with cache.attached(self), cache.new_turn(prompt_end):
                return original(self, *args, **kwargs)

        generate._kvpolicy_wraps = original  # type: ignore[attr-defined]
        GenerationMixin.generate = generate


def check_generation(
    model: Any, cache: PolicyCache, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | None:
    """Check a call of `generate` before anything is computed.

    Returns:
        The columns of the context at the prompt's end, where the prompt may come in several
        forwards or with draft tokens behind it; else None: it comes in one forward.

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
    if mode not in MODES:
        raise UnsupportedGenerationError(
            f"generation mode must be one of {', '.join(each.value for each in MODES)} with a "
            f"PolicyCache, got {mode.value}, which Transformers no longer has itself"
        )
    chunked = config.prefill_chunk_size is not None
    drops = bool(cache.policy.propagation.acting_layers(model.config.num_hidden_layers))
    if chunked and drops:
        raise UnsupportedGenerationError(
            f"prefill_chunk_size must be None where {cache.policy} drops tokens, got "
            f"{config.prefill_chunk_size}; the prompt must come in one forward"
        )
    if mode == GenerationMode.ASSISTED_GENERATION and (
        config.output_attentions or (config.output_hidden_states and drops)
    ):
        raise UnsupportedGenerationError(
            "output_attentions, and output_hidden_states where tokens are dropped, must be False "
            "in assisted generation with a PolicyCache: they would be cut by columns that are not "
            "theirs"
        )
    if kwargs.get("use_cache", config.use_cache) is False:
        raise UnsupportedGenerationError("use_cache must be True with a PolicyCache, got False")
    prompt_end = _check_continuation(cache, args, kwargs)
    _check_model_keeps_cache(model, cache, config, prompt_end)
    return prompt_end if chunked or mode == GenerationMode.ASSISTED_GENERATION else None


def _check_model_keeps_cache(
    model: Any, cache: PolicyCache, config: GenerationConfig, prompt_end: int | None
) -> None:
    """Refuse a length at which the model's `generate` would give up its cache and go on without."""
    text_config = model.config.get_text_config()
    limit = getattr(text_config, "original_max_position_embeddings", None)
    if text_config.model_type not in GIVE_UP_CACHE or limit is None or prompt_end is None:
        return
    longest = prompt_end + config.max_new_tokens if config.max_new_tokens else config.max_length
    if cache.get_seq_length() <= limit < max(longest or 0, prompt_end):
        raise UnsupportedGenerationError(
            f"prompt and new tokens of {text_config.model_type} must stay within "
            f"original_max_position_embeddings, {limit} tokens, got {prompt_end} and "
            f"{config.max_new_tokens}: its generate drops the cache where a context crosses that "
            "length; call the model in a loop of your own inside `with cache.attached(model):`"
        )


def _effective_config(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The configuration `generate` will arrive at: arguments, then given, then the model's."""
    config = copy.deepcopy(model.generation_config)
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    for source in (given.to_dict() if isinstance(given, GenerationConfig) else {}, kwargs):
        known = {name: value for name, value in source.items() if hasattr(config, name)}
        config.update(**{name: value for name, value in known.items() if value is not None})
    assert isinstance(config, GenerationConfig)
    return config


def _check_continuation(
    cache: PolicyCache, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | None:
    """Columns of the whole context that the inputs give; None where they cannot be told."""
    seen = cache.get_seq_length()
    embeds = kwargs.get("inputs_embeds")
    given = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    name, given = ("input_ids", given) if embeds is None else ("inputs_embeds", embeds)
    if not isinstance(given, Tensor) or given.ndim < 2:
        return None
    mask = kwargs.get("attention_mask")
    length = given.shape[1]
    if not seen:
        return length
    if embeds is None and isinstance(mask, Tensor) and mask.ndim == 2:
        length = mask.shape[1]
    whole = embeds is None or not isinstance(mask, Tensor) or mask.shape[1:2] == given.shape[1:2]
    if length <= seen or not whole:
        raise ValueError(
            f"{name} must continue the {seen} tokens the cache has seen, got {given.shape[1]}; "
            "pass the whole conversation, or (as input_ids) the new tokens with an "
            "attention_mask over the whole conversation, or reset() the cache"
        )
    return length
