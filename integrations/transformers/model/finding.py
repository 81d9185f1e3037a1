"""Find a model's decoder, its layers, and the attention module of each layer.

The decoder is the innermost module around the layers that is called with tokens or embeddings. In
BERT and similar models the layers are deeper, inside a module that is called with hidden states. If
a layer attends several times (LongCat Flash), each of its attention modules counts as a layer: it
can evict tokens, but drops none, since no token can leave between two of them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.model.modules import modules_of, path_to, signature
from kvpolicy.integrations.transformers.model.unseen import column_bias, takes_cache, without_cache
from kvpolicy.integrations.transformers.surface import cache_name, calls_interface
from kvpolicy.kinds import TokenKind

# Attributes under which models with several inputs hold the part that decodes text.
_INNER = ("language_model", "text_model", "decoder", "model", "transformer")


def find_decoder(model: Any) -> nn.Module:
    """Find the module in a model that runs the decoder layers one after the other."""
    config = getattr(model, "config", None)
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"model must be decoder-only, got the encoder-decoder {name}")
    check_uncompiled(model)
    for each in _candidates(model):
        if layer_list(each) is not None:
            return _reading_tokens(model, each)
    # If layers attend several times each: the innermost module around the attention modules.
    around = [each for each in _candidates(model) if attending_in_turn(each)]
    if around:
        return _reading_tokens(model, around[-1])
    raise UnsupportedModelError(_without_layers(model))


def _without_layers(model: nn.Module) -> str:
    """Return the error message for a model without a list of decoder layers."""
    if not takes_cache(model):
        return without_cache(model)
    config = getattr(model, "config", None)
    name, count = type(model).__name__, getattr(config, "num_hidden_layers", None)
    attending = _calling_interface(model)
    if count and attending and len(attending) < count:
        return (
            f"model must run each of its layers once for a token, got {name}, whose {count} layers "
            f"of keys and values are those of {len(attending)} modules that it runs several times"
        )
    for each in model.modules():
        if isinstance(each, nn.ModuleList) and len(each) and (bias := column_bias(each[0])):
            return bias
    return f"model must have get_decoder() with a list of decoder layers, got {name}"


def _reading_tokens(model: nn.Module, module: nn.Module) -> nn.Module:
    """Return the innermost module, from ``module`` outwards, that takes ids or embeddings.

    Models like BERT embed the tokens before they call the module that has the layers.
    """
    around = [*path_to(model, module).values()][::-1] or [module]
    found = next((each for each in around if _takes_tokens(each)), module)
    for each in around[: around.index(found) + 1]:
        check_uncompiled(each)
    is_decoder = getattr(getattr(model, "config", None), "is_decoder", True)
    if found is not module and is_decoder is False:
        raise UnsupportedModelError(
            "model must be a decoder, got one whose config.is_decoder is False, so that tokens see "
            "later ones; load it with is_decoder=True"
        )
    return found


def _takes_tokens(module: nn.Module) -> bool:
    names = signature(type(module).forward).parameters.keys()
    return bool({"input_ids", "inputs_embeds"} & names)


def _candidates(model: Any) -> Iterator[nn.Module]:
    """Yield the modules of a model that may be its decoder, the likeliest first."""
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
        # Needed for a head that has no `get_decoder`.
        queue += [each for each in module.children() if layer_list(each) is not None]


def placeholders_of(model: Any) -> dict[int, TokenKind]:
    """Return the token ids that stand for image, video or audio features, with their kind."""
    config = getattr(model, "config", None)
    found = {}
    for kind in (TokenKind.IMAGE, TokenKind.VIDEO, TokenKind.AUDIO):
        for name in ("token_id", "token_index"):
            token = getattr(config, f"{kind.name.lower()}_{name}", None)
            if isinstance(token, int):
                found[token] = kind
    return found


def check_uncompiled(module: nn.Module) -> None:
    """Check that a module was not compiled by `torch.compile`, where hooks have no effect."""
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
    """Return a decoder's list of layers, recognised by the length in its configuration."""
    config = getattr(decoder, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == count and count:
            return module
    return None


def layers_within(decoder: nn.Module) -> list[nn.Module]:
    """Return a decoder's layers, or its attention modules if it has no list of layers.

    The list may be its own or that of a module inside it.
    """
    for each in _candidates(decoder):
        found = layer_list(each)
        if found is not None:
            return list(found)
    return attending_in_turn(decoder)


def attending_in_turn(decoder: nn.Module) -> list[nn.Module]:
    """Return a decoder's attention modules in order, if every layer has exactly one.

    The number of layers is that of the configuration, and the modules must count them from 0.
    """
    count = getattr(getattr(decoder, "config", None), "num_hidden_layers", None)
    found = _calling_interface(decoder)
    in_turn = [getattr(each, "layer_idx", None) for each in found] == list(range(count or 0))
    return found if in_turn else []


def _calling_interface(outer: nn.Module) -> list[nn.Module]:
    """Return the modules inside a module, itself included, that call Transformers' attention."""
    return [
        each
        for each in modules_of(outer)
        # The class is asked first: torch takes long to find that a module has no such attribute.
        if calls_interface(getattr(type(each), "forward", None)) and hasattr(each, "config")
    ]


def find_attention(layer: nn.Module, index: int) -> nn.Module | None:
    """Find the one module of a layer that calls Transformers' attention; None if it has none."""
    found = [each for each in _calling_interface(layer) if _is_of_layer(each, index)]
    # A second module may attend to what earlier layers gave for the same token, without the cache.
    if len(found) > 1:
        found = [each for each in found if cache_name(type(each).forward)] or found
    # Another may attend to the tokens of an encoder, which a decoder alone does not call.
    if len(found) > 1:
        found = [each for each in found if not _is_cross(layer, each)] or found
    if len(found) > 1:
        raise UnsupportedModelError(
            "no decoder layer may have several modules that call Transformers' "
            "AttentionInterface, the only place where queries can be seen, but "
            f"{type(layer).__name__} at {index} has {len(found)}"
        )
    return found[0] if found else None


def _is_of_layer(module: nn.Module, index: int) -> bool:
    """True if a module's layer index fits the layer, or the module has none.

    A module whose weights several layers share has no index.
    """
    own = getattr(module, "layer_idx", index)
    return own is None or own in (index, -1)


def _is_cross(layer: nn.Module, attention: nn.Module) -> bool:
    name = [*path_to(layer, attention)][-1]
    return "cross" in name or "encoder_attn" in name


def stateful_parts(module: nn.Module, attention: nn.Module | None) -> Iterator[nn.Module]:
    """Yield the modules in a layer that take the cache but do not attend."""
    for each in module.children():
        takes = cache_name(type(each).forward) is not None
        if takes and not any(inner is attention for inner in modules_of(each)):
            yield each
        else:
            yield from stateful_parts(each, attention)


def check_holds_states(layer: nn.Module, index: int, attention: nn.Module | None) -> None:
    """Check that a recurrent layer keeps its states in the cache, not in the model."""
    if not any(True for _ in stateful_parts(layer, attention)):
        raise UnsupportedModelError(
            f"every recurrent layer must hold its state in the cache, but {type(layer).__name__} "
            f"at {index} keeps it in the model itself, where calls with other caches change it; "
            "it can be neither copied nor undone"
        )
