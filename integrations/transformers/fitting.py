"""Check that a cache and its policy fit a model, and prepare the cache's layers for the model."""

import warnings
from typing import Any

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.dispatcher import ForwardDispatcher
from kvpolicy.integrations.transformers.model.masks import FLASH, first_seen
from kvpolicy.integrations.transformers.model.parallel import HeadSharding
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.state.fingerprint import ModelFingerprint
from kvpolicy.integrations.transformers.state.recurrent import layer_for, link
from kvpolicy.integrations.transformers.surface import CACHE, names_in
from kvpolicy.policy import CachePolicy

# These adapters replace the caller's cache with a cache of their own, filled with learnt keys and
# values.
CACHES_OF_THEIR_OWN = ("PREFIX_TUNING", "CARTRIDGE")


def fit(reader: ForwardDispatcher, parts: ModelParts, loaded_for: ModelFingerprint | None) -> None:
    """Make an empty cache's layers for a model, or check that a filled cache fits it.

    ``loaded_for`` is the model that filled a cache which was loaded from a file.
    """
    if reader.tokens is None:
        room = reserved_slots(reader.policy, reader.max_new_tokens)
        reader.layers[:] = [layer_for(kind, reader.storage, room) for kind in parts.kinds]
        link(reader.layers)
    elif len(reader.layers) != parts.num_layers:
        raise ValueError(
            f"model must have the {len(reader.layers)} layers of the model that filled the "
            f"cache, got one with {parts.num_layers}; use a new PolicyCache"
        )
    elif reader.filled_by is not None and reader.filled_by() is not parts.decoder:
        raise ValueError(
            "model must be the one that filled the cache, got another one; use a new "
            "PolicyCache or reset() this one"
        )
    elif reader.filled_by is None and loaded_for is not None:
        _check_loaded_for(loaded_for, ModelFingerprint.of(parts.decoder))
        _check_kinds(reader, parts)
        _move_to(reader, parts)
    if reader.tokens is not None and parts.implementation in FLASH:
        _check_flash(reader, parts)
    _find_heads(reader, parts)
    _check_bounded(reader)


def reserved_slots(policy: CachePolicy, longest: int | None) -> int:
    """Return how many slots each layer reserves for the tokens of an answer."""
    if policy.decoding is None:
        return longest or 0
    every = policy.decoding.every
    return every if longest is None else min(longest, every)


def check_room(reader: ForwardDispatcher, parts: ModelParts, longest: int | None) -> None:
    """Check that a cache reserves memory for no more tokens than a model has positions."""
    most, room = parts.max_positions, reserved_slots(reader.policy, longest)
    if most is None or room <= most:
        return
    name, remedy = "max_new_tokens", "the longest answer you expect, or None to let it grow"
    if longest is None:
        name, remedy = (
            "'every' of the policy's decoding",
            "the number of tokens by which a layer may grow",
        )
    raise ValueError(
        f"{name} must be at most {most}, the number of positions of {type(parts.model).__name__}, "
        "since memory for this many tokens is reserved when a prompt is read, got "
        f"{longest or room}; pass {remedy}"
    )


def _check_bounded(reader: ForwardDispatcher) -> None:
    """Check that every layer can evict by the policy's rule while an answer is decoded."""
    if reader.policy.decoding is None:
        return
    blind = [i for i, layer in enumerate(reader.layers) if not layer.facts.shows_queries]
    if blind and reader.policy.decoding.num_queries != 0:
        raise UnsupportedModelError(
            f"decoding of {reader.policy} must not read queries with a model whose attention does "
            f"not show them, as in layers {blind}; use the rule of StreamingLLM, KeyNorm, "
            "KeyDiff, LagKV, CurDKV or Random"
        )


def _check_flash(reader: ForwardDispatcher, parts: ModelParts) -> None:
    """Check that what a cache holds needs no mask, which flash attention cannot take."""
    for index, (layer, window) in enumerate(zip(reader.layers, parts.windows, strict=True)):
        held, lacks = layer.positions, ""
        if layer.contents.ragged:
            lacks = "equally many tokens in all heads"
        elif window is not None and held is not None and layer.tokens is not None:
            lengths = layer.tokens.lengths.to(held.device)[:, None]
            seen = (held >= first_seen(lengths, window)[:, :, None].clamp(min=0)).sum(dim=2)
            if bool((seen < lengths.clamp(max=window - 1)).any()):
                lacks = "all tokens of a layer's sliding window"
        if lacks:
            raise UnsupportedModelError(
                f"a cache must hold {lacks} under attn_implementation={parts.implementation!r}, "
                f"but layer {index} does not, which was filled under another implementation; load "
                "the model with attn_implementation='sdpa' or 'eager'"
            )


def _check_loaded_for(saved: ModelFingerprint, model: ModelFingerprint) -> None:
    difference = saved.difference(model)
    if difference is not None:
        raise ValueError(
            f"model must be the one that filled the saved cache, got another one: {difference}"
        )
    if not saved.is_comparable(model):
        warnings.warn(
            "it cannot be checked that model is the one that filled the saved cache, since no "
            "parameter's values are known of both (they are quantised, or not in memory); check "
            "this yourself, or load the model with its embeddings in memory",
            stacklevel=4,
        )


def _check_kinds(reader: ForwardDispatcher, parts: ModelParts) -> None:
    for index, (layer, kind) in enumerate(zip(reader.layers, parts.kinds, strict=True)):
        wanted = layer_for(kind, reader.storage, 0)
        if type(layer) is not type(wanted) or layer.settings() != wanted.settings():
            raise ValueError(
                f"saved cache must hold what layer {index} of the model holds (kind: {kind.name}), "
                "got something else; load it with the versions of kvpolicy and transformers that "
                "saved it"
            )


def _find_heads(reader: ForwardDispatcher, parts: ModelParts) -> None:
    """Find, for each layer, which heads this process has and whether queries can be observed."""
    tp_size = getattr(parts.model, "tp_size", None) or 1
    for layer, attention in zip(reader.layers, parts.attentions, strict=True):
        layer.facts.shows_queries = attention is not None or not layer.attends
        if attention is not None:
            layer.facts.spread = HeadSharding.of(attention, parts.config, tp_size)
        elif layer.attends:  # no queries are seen there to count
            layer.facts.query_heads = getattr(parts.config, "num_attention_heads", 0)


def _move_to(reader: ForwardDispatcher, parts: ModelParts) -> None:
    """Copy a loaded cache's tensors to the devices and the precision of a model."""
    assert reader.tokens is not None
    reader.tokens = reader.tokens.to(parts.device_of(0))
    # The dtype of the embeddings, since weights of layers may be quantised.
    dtype = next(each.dtype for each in parts.decoder.parameters() if each.is_floating_point())
    for index, layer in enumerate(reader.layers):
        saved = dtype if layer.held is None else layer.held.dtype
        if saved != dtype and any(each.state_nbytes() for each in reader.layers):
            raise ValueError(
                f"model must have the precision in which the saved cache was filled, {saved}, if "
                f"it has recurrent layers or has read images, got {dtype}; their states are stored "
                "in this precision"
            )
        # A layer with a window has a record of its own between the chunks of a prompt.
        tokens, device = layer.tokens or reader.tokens, parts.device_of(index)
        layer.move_to(device, dtype, tokens.to(device))


def check_adapters(model: Any) -> None:
    """Check that no adapter of a model would replace a `PolicyCache` or overlook it."""
    # While a `PeftModel` generates, the model inside asks it to prepare the inputs.
    prepares = vars(model).get("prepare_inputs_for_generation")
    for each in (model, getattr(prepares, "__self__", None)):
        config = getattr(each, "active_peft_config", None)
        kind = getattr(config, "peft_type", None)
        name = str(getattr(kind, "value", kind))
        if name in CACHES_OF_THEIR_OWN:
            raise UnsupportedModelError(
                f"peft_type of the model's adapter must not be {name} with a PolicyCache: it "
                "generates with a cache of its own, on which no policy acts; use an adapter in "
                "the layers (such as LoRA), or PROMPT_TUNING"
            )
        # PEFT until 0.21 asks for the cache by its name before Transformers 5.24. It takes every
        # token of an answer for a prompt then, with any cache, and puts its virtual tokens first.
        learns = each is not model and getattr(config, "is_prompt_learning", False)
        if learns and CACHE not in names_in(prepares):
            raise UnsupportedModelError(
                f"peft_type of the model's adapter must not be {name} with these versions: PEFT "
                "does not find the cache of this Transformers, and puts its virtual tokens before "
                "every token of an answer; use an older Transformers, a newer PEFT, or an adapter "
                "in the layers (such as LoRA)"
            )
