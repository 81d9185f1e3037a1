"""Finding a model's decoder, its layers, and the module of each that attends."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import Cache

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.model.call_arguments import signature
from kvpolicy.kinds import TokenKind

# Where models with several inputs keep the part that decodes text.
_INNER = ("language_model", "text_model", "decoder", "model", "transformer")


def find_decoder(model: Any) -> nn.Module:
    """The module that runs the decoder layers, one after the other.

    Raises:
        UnsupportedModelError: There is none that can be found, or it is compiled.
    """
    config = getattr(model, "config", None)
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"model must be decoder-only, got the encoder-decoder {name}")
    check_uncompiled(model)
    for each in _candidates(model):
        if layer_list(each) is not None:
            return each
    raise UnsupportedModelError(
        f"model must have get_decoder() with a list of decoder layers, got {name}"
    )


def _candidates(model: Any) -> Iterator[nn.Module]:
    """Modules that may be the decoder, the likeliest first."""
    seen: set[int] = set()
    queue: list[Any] = [model]
    while queue:
        module = queue.pop(0)
        if id(module) in seen or not isinstance(module, nn.Module):
            continue
        seen.add(id(module))
        yield module
        if hasattr(module, "get_decoder"):
            found: Any = module
            queue.append(found.get_decoder())
        queue += [getattr(module, name, None) for name in _INNER]
        # A head that does not name its decoder.
        queue += [each for each in module.children() if layer_list(each) is not None]


def modules_between(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """The modules through which a call of a model reaches its decoder, both left out."""
    path = next((name for name, each in model.named_modules() if each is decoder), "")
    parts = path.split(".")
    return [model.get_submodule(".".join(parts[:end])) for end in range(1, len(parts))]


def placeholders_of(model: Any) -> dict[int, TokenKind]:
    """The token ids that stand for features of images, videos and sounds, and what they are."""
    config = getattr(model, "config", None)
    found = {}
    for kind in (TokenKind.IMAGE, TokenKind.VIDEO, TokenKind.AUDIO):
        for name in ("token_id", "token_index"):
            token = getattr(config, f"{kind.name.lower()}_{name}", None)
            if isinstance(token, int):
                found[token] = kind
    return found


def check_uncompiled(module: nn.Module) -> None:
    """Check that a module that hooks go on, or its forward, was not given to `torch.compile`."""
    if (
        isinstance(module, torch._dynamo.OptimizedModule)
        or module._compiled_call_impl is not None
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    ):
        raise UnsupportedModelError(
            "model must not be compiled, since hooks do not reach a compiled graph, got a compiled "
            f"{type(module).__name__}; pass the model before torch.compile"
        )


def layer_list(decoder: Any) -> nn.ModuleList | None:
    """The list of a decoder's layers: as many as its configuration says."""
    config = getattr(decoder, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == count and count:
            return module
    return None


def find_attention(layer: nn.Module, index: int) -> nn.Module:
    """The one module of a layer that calls an attention function of Transformers.

    Raises:
        UnsupportedModelError: There is none, or several.
    """
    found = [
        module
        for module in layer.modules()
        if _is_of_layer(module, index)
        and hasattr(module, "config")
        and "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names
    ]
    # Beside it may stand one for the tokens of an encoder, which a decoder alone does not call.
    found = [each for each in found if not _is_cross(layer, each)] or found
    if len(found) != 1:
        raise UnsupportedModelError(
            "every decoder layer must have one module that calls Transformers' AttentionInterface, "
            f"the only place where queries can be seen, but {type(layer).__name__} at {index} has "
            f"{len(found)}"
        )
    return found[0]


def _is_of_layer(module: nn.Module, index: int) -> bool:
    """Whether a module is its layer's own; one whose weights several layers share has no index."""
    own = getattr(module, "layer_idx", index)
    return own is None or own in (index, -1)


def _is_cross(layer: nn.Module, attention: nn.Module) -> bool:
    name = next(name for name, each in layer.named_modules() if each is attention)
    return "cross" in name or "encoder_attn" in name


def stateful_parts(module: nn.Module, attention: nn.Module | None) -> Iterator[nn.Module]:
    """The modules inside of a layer that are given the cache, and do not attend.

    Args:
        module: The layer.
        attention: The one that does, which may hold such modules itself; None without one.
    """
    for each in module.children():
        names = signature(type(each).forward).parameters.keys()
        takes_cache = not names.isdisjoint(("past_key_values", "cache_params"))
        if takes_cache and not any(inner is attention for inner in each.modules()):
            yield each
        else:
            yield from stateful_parts(each, attention)


def check_holds_states(layer: nn.Module, index: int, attention: nn.Module | None) -> None:
    """Check that a recurrent layer gives its states to the cache.

    Raises:
        UnsupportedModelError: It keeps them itself.
    """
    if not any(True for _ in stateful_parts(layer, attention)):
        raise UnsupportedModelError(
            "every recurrent layer must hold its state in the cache, but "
            f"{type(layer).__name__} at {index} keeps it in the model itself, where calls with "
            "other caches change it; it can be neither copied nor taken back"
        )


def takes_own_caches_only(decoder: nn.Module) -> bool:
    """Whether a decoder says that its cache is of a class that its own module defines."""
    parameter = signature(type(decoder).forward).parameters.get("past_key_values")
    named = None if parameter is None else parameter.annotation
    known = (named, *typing.get_args(named))
    module = type(decoder).__module__
    return any(
        isinstance(each, type) and issubclass(each, Cache) and each.__module__ == module
        for each in known
    )
