"""Wrap `model.generate`, so that a policy cache is attached to the model while it runs."""

import copy
import functools
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, StoppingCriteria

from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers.applying import applied_to
from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.continuation import Given
from kvpolicy.integrations.transformers.forward.lent_answer import LentAnswer
from kvpolicy.integrations.transformers.model.both_ways import cuts_of
from kvpolicy.integrations.transformers.model.masks import DENSE
from kvpolicy.integrations.transformers.surface import (
    ATTN_IMPLEMENTATION,
    CACHE,
    CACHE_NAMES,
    MASKS_OF_STEP,
    GenerationMode,
    create_masks_for_generate,
    given_cache,
)
from kvpolicy.policy import CachePolicy

_lock = threading.Lock()

# In these families `prepare_inputs_for_generation` changes the rotary factors at a certain length,
# and drops the cache there.
GIVE_UP_CACHE = ("phi3", "phimoe")

# Contrastive search, DoLa, and group or constrained beams are no longer part of Transformers: they
# are `custom_generate` code, which handles caches in its own way.
MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)


def wrap_generate() -> None:
    """Wrap `GenerationMixin.generate` to attach a policy cache to the model while it runs.

    `generate` does not tell a user's cache which model it belongs to, and no other public place
    does. Calls without a policy cache pass straight through, unless a policy is applied to the
    model (`apply_policy`), which gives them one. Only importing this package wraps `generate`;
    other imports of the library change nothing in Transformers.
    """
    with _lock:
        original = GenerationMixin.generate
        if hasattr(original, "_kvpolicy_wraps"):
            return

        @functools.wraps(original)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            cache = given_cache(kwargs)
            applied = None if cache is not None or _drafts(kwargs) else applied_to(self)
            if applied is not None:
                cache = applied._new_cache()
            if not isinstance(cache, PolicyCache):
                _check_is_no_policy(cache)
                return original(self, *args, **kwargs)
            cache._check_thread()
            kwargs = {**{k: v for k, v in kwargs.items() if k not in CACHE_NAMES}, CACHE: cache}
            turn = check_generation(self, cache, args, kwargs)
            with cache.attached(self), _masks_of_steps(self):
                turn.given.check_same(cache._reader.tokens)
                with turn.of(cache):
                    if turn.unhooked is not None:
                        args, kwargs = AnswerIds(cache._reader.answer).added(args, kwargs)
                    output = original(self, *args, **kwargs)
            if applied is not None:
                applied._note(cache)
            return output

        generate._kvpolicy_wraps = original  # type: ignore[attr-defined]
        GenerationMixin.generate = generate


def _drafts(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a `generate` call drafts tokens for the `generate` of another model."""
    return bool(getattr(kwargs.get("generation_config"), "is_assistant", False))


def _check_is_no_policy(cache: Any) -> None:
    """Check that the cache of a call is not a policy, or a cache class without its policy."""
    kind = cache if isinstance(cache, type) else type(cache)
    if issubclass(kind, CachePolicy):
        kind.get_seq_length()
    if kind is cache and issubclass(kind, PolicyCache):
        raise TypeError(
            f"{CACHE} must be a cache, got the class {kind.__name__}; pass {kind.__name__}(policy)"
        )


@attrs.frozen
class Turn:
    """The settings of one turn: a new prompt given to `generate`, and the answer to it.

    Args:
        given: The inputs of the call.
        drafts: Whether tokens that were read may be removed again, as rejected draft tokens are.
        prompt_end, may_be_static, unhooked: See `ForwardDispatcher.new_turn`.
    """

    given: Given
    drafts: bool
    prompt_end: int | None
    may_be_static: bool
    unhooked: int | None

    def of(self, cache: PolicyCache) -> AbstractContextManager[None]:
        """Return the context manager in which an attached cache reads and answers this turn."""
        if self.drafts and not all(layer.is_croppable for layer in cache.layers):
            raise UnsupportedGenerationError(
                "assistant_model and prompt_lookup_num_tokens must be None with a model that has "
                "recurrent layers, since draft tokens cannot be removed from their state"
            )
        return cache._reader.new_turn(
            self.prompt_end, may_be_static=self.may_be_static, unhooked=self.unhooked
        )


class AnswerIds(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that never stops, and tells a cache which token is read next.

    An answer's tokens may run without hooks, so that no hook can note their ids.

    Args:
        answer: The manager of the cache's answers.
    """

    def __init__(self, answer: LentAnswer) -> None:
        self.answer = answer

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Note the last ids of ``input_ids`` ``[batch, len]``; stop in no row."""
        self.answer.note_ids(input_ids[:, -1:])
        return input_ids.new_zeros(len(input_ids), dtype=torch.bool)

    def added(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a `generate` call with this criterion among its own."""
        if len(args) > 3:
            return (*args[:3], [*(args[3] or ()), self], *args[4:]), kwargs
        given = kwargs.get("stopping_criteria") or ()
        return args, {**kwargs, "stopping_criteria": [*given, self]}


class _StepMasks:
    """A replacement for a model's function that makes `generate`'s masks, while it generates.

    A policy cache makes the mask of its decoding step itself; other caches get the original masks.

    Args:
        model: The model.
    """

    name = MASKS_OF_STEP

    def __init__(self, model: Any) -> None:
        self.before = vars(model).get(self.name)  # of the object, not of its class
        self.original = getattr(model, self.name, create_masks_for_generate)
        self.users = 0

    def __call__(self, **kwargs: Any) -> Any:
        cache = given_cache(kwargs)
        if isinstance(cache, PolicyCache):
            return cache._reader.answer.mask_of_step(kwargs.get("attention_mask"))
        return self.original(**kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.original  # a copy of the model does not generate here


@contextmanager
def _masks_of_steps(model: Any) -> Iterator[None]:
    """Let a policy cache make the masks of `generate`'s decoding steps, in a `with` block.

    The cache decodes into fixed buffers then, and `generate` may compile the steps.
    """
    own = vars(model)
    with _lock:
        masks = own.get(_StepMasks.name)
        if not isinstance(masks, _StepMasks):
            masks = own[_StepMasks.name] = _StepMasks(model)
        masks.users += 1
    try:
        yield
    finally:
        with _lock:
            masks.users -= 1
            if not masks.users:
                del own[_StepMasks.name]
                own.update({} if masks.before is None else {_StepMasks.name: masks.before})


def check_generation(
    model: Any, cache: PolicyCache, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Turn:
    """Check the arguments of a `generate` call with a policy cache; return its turn."""
    if kwargs.get("custom_generate") is not None and not cache.is_attached:
        raise UnsupportedGenerationError(
            "custom_generate must be None unless the cache is attached, since it may use a "
            "PolicyCache in any way; attach the cache yourself, and call generate inside of "
            "`with cache.attached(model):`"
        )
    config = effective_config(model, args, kwargs)
    mode = config.get_generation_mode(kwargs.get("assistant_model"))
    if mode not in MODES:
        raise UnsupportedGenerationError(
            f"generation mode must be one of {', '.join(each.value for each in MODES)} with a "
            f"PolicyCache, got {mode.value}, which Transformers itself no longer has"
        )
    chunk, drafts = config.prefill_chunk_size, mode == GenerationMode.ASSISTED_GENERATION
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    drops = bool(cache.policy.propagation.acting_layers(num_layers))
    if drafts and cache.policy.decoding is not None:
        raise UnsupportedGenerationError(
            "assistant_model and prompt_lookup_num_tokens must be None with a policy that evicts "
            f"while it decodes, got {cache.policy}: tokens that it evicts for rejected draft "
            "tokens cannot come back"
        )
    if drafts and (config.output_attentions or (config.output_hidden_states and drops)):
        raise UnsupportedGenerationError(
            "output_attentions must be False in assisted generation with a PolicyCache, and so "
            "must output_hidden_states if tokens are dropped: they would be cut at the wrong "
            "columns"
        )
    _check_cache_is_used(model, args, kwargs)
    held = kwargs.get("cache_implementation", config.cache_implementation)
    # Transformers leaves out hybrid, an old default; paged is refused where its cache is made.
    if held not in (None, "hybrid", "paged"):
        raise UnsupportedGenerationError(
            "cache_implementation must be None with a PolicyCache, in the call and in the "
            f"generation config, got {held!r}; to hold keys and values on another device or "
            "quantised, give the PolicyCache or apply_policy a storage"
        )
    if cache.max_new_tokens is not None and config.output_attentions:
        warnings.warn(
            "output_attentions keeps generate from decoding into the cache's fixed buffers "
            "(max_new_tokens), so that nothing is compiled; leave one of them out",
            stacklevel=3,
        )
    given = Given.of(args, kwargs)
    given.check_continues(cache._reader.tokens)
    if chunk is not None:
        _check_chunks(model, given, kwargs, chunk, cache._reader.seen)
    _check_model_keeps_cache(model, cache, config, given)
    # Continuous batching takes no stopping criteria, by which ids are noted.
    alone = kwargs.get("custom_generate") is None and held != "paged"
    alone = alone and mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    # Attention weights would be as wide as the fixed buffers.
    may_be_static = alone and chunk is None and not config.output_attentions
    return Turn(
        given,
        drafts,
        prompt_end=given.context_len if drafts or chunk is not None else None,
        may_be_static=may_be_static and getattr(model.config, ATTN_IMPLEMENTATION) in DENSE,
        unhooked=_answer_len(config, given) if alone else None,
    )


def _answer_len(config: GenerationConfig, given: Given) -> int:
    """Return the largest number of tokens that `generate` decodes."""
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if config.max_length is None:
        return 20  # Transformers' default, whatever the length of the prompt
    # It counts the ids given, which may be the new ones only.
    return max(int(config.max_length) - (given.ids_len or given.context_len or 0), 0)


def _check_chunks(model: Any, given: Given, kwargs: dict[str, Any], size: int, seen: int) -> None:
    """Check that `generate` can cut these inputs into chunks of ``size`` columns."""
    if given.embeds is not None:
        raise UnsupportedGenerationError(
            f"prefill_chunk_size must be None with inputs_embeds, got {size}: generate cuts only "
            "input_ids; call the model with chunks of them in a loop of your own inside `with "
            "cache.attached(model):`, after cache.start_turn(prompt_len=...)"
        )
    if given.ids is None or given.context_len is None:
        return
    shape = given.ids.shape[0], given.context_len
    mask = given.mask
    plain = isinstance(mask, Tensor) and mask.shape == shape
    valid = mask.bool().cpu() if plain else torch.ones(shape, dtype=torch.bool)
    cuts = cuts_of(model, kwargs, valid, seen)
    if cuts is not None:
        cuts.check_size(size, seen)


def _check_cache_is_used(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that neither the call nor a configuration sets ``use_cache=False``."""
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    text_config = model.config.get_text_config(decoder=True)
    called = {"use_cache": kwargs, "use_cache of generation_config": vars(given) if given else {}}
    own = {
        "use_cache of the model's generation_config": model.generation_config,
        "use_cache of the model's config": model.config,
        "use_cache of the model's text config": text_config,
    }
    said = [(name, each.get("use_cache")) for name, each in called.items()]
    explicit = [each for each in said if each[1] is not None][:1]
    for name, value in explicit or [(n, getattr(c, "use_cache", None)) for n, c in own.items()]:
        if value is False:
            raise UnsupportedGenerationError(
                f"{name} must be True with a PolicyCache, got False; set it, or pass use_cache=True"
            )


def _check_model_keeps_cache(
    model: Any, cache: PolicyCache, config: GenerationConfig, given: Given
) -> None:
    """Check that the model's `generate` will not discard its cache at this context length."""
    text_config = model.config.get_text_config(decoder=True)
    limit = getattr(text_config, "original_max_position_embeddings", None)
    prompt_end, longest = given.context_len, _answer_len(config, given)
    if text_config.model_type not in GIVE_UP_CACHE or limit is None or prompt_end is None:
        return
    if cache.get_seq_length() <= limit < prompt_end + longest:
        raise UnsupportedGenerationError(
            f"prompt and new tokens of {text_config.model_type} must stay within "
            f"original_max_position_embeddings, {limit} tokens, got {prompt_end} and "
            f"{longest}: its generate drops the cache where a context crosses that "
            "length; call the model in a loop of your own inside `with cache.attached(model):`"
        )


def effective_config(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> GenerationConfig:
    """Return the generation settings of a call: from arguments, ``generation_config`` and model."""
    config = copy.deepcopy(model.generation_config)
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    if given is not None and not isinstance(given, GenerationConfig):
        raise TypeError(f"generation_config must be a GenerationConfig, got {given!r}")
    for source in ({} if given is None else given.to_dict(), kwargs):
        known = {name: value for name, value in source.items() if hasattr(config, name)}
        config.update(**{name: value for name, value in known.items() if value is not None})
    assert isinstance(config, GenerationConfig)
    return config
