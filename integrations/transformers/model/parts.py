"""What a cache needs to know of a model: its layers, their attention, and what each can see."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.masks import FLASH, IMPLEMENTATIONS
from kvpolicy.policy import CachePolicy

# Families that are held against dense attention under a policy's mask, by their model_type.
MODEL_TYPES = frozenset(
    {
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granitemoe",
        "hunyuan_v1_dense",
        "llama",
        "minimax_m2",
        "ministral3",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "opt",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)

# Families that a policy cannot be applied to for a reason of their own, which is given.
REFUSED = {
    "deepseek_v2": "its latent attention stores what keys and values are made from, not these",
    "deepseek_v3": "its latent attention stores what keys and values are made from, not these",
    "diffllama": "it attends with the keys of one head and the values of another",
    "gemma3n_text": "its last layers attend to the keys of earlier ones",
    "gemma4_text": "its last layers attend to the keys of earlier ones",
    "gpt2": "it takes for granted that as many tokens leave its layers as enter them",
    "gpt_bigcode": "it takes for granted that as many tokens leave its layers as enter them",
    "llama4_text": "its layers attend within chunks, and scale queries by their place in a cache",
}
# Attention of these is no call of Transformers' AttentionInterface.
_OWN_ATTENTION = ("bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt")
REFUSED |= dict.fromkeys(
    _OWN_ATTENTION,
    "its attention does not call Transformers' AttentionInterface, the only place "
    "where queries can be seen",
)
# These mix tokens into states.
_RECURRENT = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "mamba",
    "mamba2",
    "qwen3_next",
    "qwen3_5_text",
)
REFUSED |= dict.fromkeys(
    _RECURRENT, "some of its layers hold a recurrent state, from which no token can be taken"
)


class ModelParts:
    """The modules of a model that a cache attaches to.

    Args:
        model: A decoder-only language model of Transformers, with or without its head.

    Attributes:
        decoder: The model without its head.
        layers: Its decoder layers.
        attentions: The attention module of each.
        windows: For each, the tokens its sliding window sees, itself among them; None where it
            sees all.

    Raises:
        TypeError: ``model`` is not a torch module.
        UnsupportedModelError: A policy cannot be applied to it; says why.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.model = model
        self.decoder = _find_decoder(model)
        for module in (self.decoder, *model.children()):
            # A model may name the decoder inside of a compiled one as its own.
            if getattr(module, "_orig_mod", module) is self.decoder:
                _check_uncompiled(module)
        self.config: Any = self.decoder.config
        layers = _layer_list(self.decoder)
        assert layers is not None
        self.layers: list[nn.Module] = list(layers)
        for layer in self.layers:
            _check_uncompiled(layer)
        self.windows = _find_windows(self.config, len(self.layers))
        self.attentions = [_find_attention(layer, i) for i, layer in enumerate(self.layers)]
        for attention in self.attentions:
            _check_uncompiled(attention)
        _ = self.implementation

    @property
    def implementation(self) -> str:
        """The attention implementation, which may be changed between two forwards.

        Raises:
            UnsupportedModelError: It is one whose masks are not known.
        """
        name = str(self.config._attn_implementation)
        if name not in IMPLEMENTATIONS:
            raise UnsupportedModelError(
                f"attn_implementation of the model must be one of {', '.join(IMPLEMENTATIONS)}, "
                f"got {name!r}; load it with attn_implementation='sdpa'"
            )
        return name

    @property
    def plain_scores(self) -> bool:
        """Whether attention is a softmax of products, without a cap or sinks."""
        capped = getattr(self.config, "attn_logit_softcapping", None) is not None
        return not capped and not any(hasattr(each, "sinks") for each in self.attentions)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def device_of(self, index: int) -> torch.device:
        """The device on which a layer computes.

        Offloaded weights are on none before it runs. Then a buffer of the decoder tells, such as
        that of its rotary embedding, or another parameter; without any, it is the CPU.
        """
        found = itertools.chain(
            self.layers[index].parameters(), self.decoder.buffers(), self.decoder.parameters()
        )
        return next((each.device for each in found if not each.is_meta), torch.device("cpu"))

    def check_policy(self, policy: CachePolicy, context_len: int) -> None:
        """Check that a policy can act on a context of a length.

        Raises:
            UnsupportedModelError: It drops tokens after a layer that cannot see them all.
        """
        acting = policy.propagation.acting_layers(self.num_layers)
        short = [
            i for i, window in enumerate(self.windows) if (window or context_len) < context_len
        ]
        if short and policy.propagation.restarts:
            raise UnsupportedModelError(
                f"context must fit the sliding window of every layer where {policy} restarts the "
                f"prefill at new positions, {self.windows[short[0]]} tokens, got {context_len}"
            )
        if short and acting and self.implementation in FLASH:
            raise UnsupportedModelError(
                f"context must fit the sliding window of every layer where {policy} drops tokens "
                f"under flash attention, which measures windows in keys, {self.windows[short[0]]} "
                f"tokens, got {context_len}; load the model with attn_implementation='sdpa'"
            )
        blind = sorted(acting & set(short))
        if blind:
            raise UnsupportedModelError(
                f"layers after which {policy.propagation} drops tokens must see the whole context, "
                f"but the sliding window of layers {blind} sees {self.windows[blind[0]]} of "
                f"{context_len} tokens; layers that see all: "
                f"{[i for i in range(self.num_layers) if i not in short] or 'none'}"
            )


def _find_decoder(model: Any) -> nn.Module:
    config = getattr(model, "config", None)
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"model must be decoder-only, got the encoder-decoder {name}")
    _check_uncompiled(model)
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is model and _layer_list(model) is None:  # a head that does not name its decoder
        inner = [each for each in model.children() if _layer_list(each) is not None]
        decoder = inner[0] if inner else None
    kind = getattr(getattr(decoder, "config", config), "model_type", None)
    if kind in REFUSED:
        raise UnsupportedModelError(
            f"model_type {kind!r} ({name}) is not supported: {REFUSED[kind]}"
        )
    if config is None or decoder is None or not hasattr(decoder, "config"):
        raise UnsupportedModelError(
            f"model must have get_decoder() with a list of decoder layers, got {name}"
        )
    if kind not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"model_type must be one of {', '.join(sorted(MODEL_TYPES))}, got {kind!r} ({name}); "
            "other families have not been held against dense attention"
        )
    if _layer_list(decoder) is None:
        raise UnsupportedModelError(
            f"model must have get_decoder() with a list of decoder layers, got {name}"
        )
    assert isinstance(decoder, nn.Module)
    return decoder


def _check_uncompiled(module: nn.Module) -> None:
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


def _layer_list(decoder: Any) -> nn.ModuleList | None:
    """The list of a decoder's layers: as many as its configuration says."""
    config = getattr(decoder, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == count and count:
            return module
    return None


def _find_windows(config: Any, num_layers: int) -> list[int | None]:
    """Each layer's sliding window, as Transformers' own cache has it.

    Raises:
        UnsupportedModelError: A layer holds something else than keys and values of its own.
    """
    own = DynamicCache(config=config).layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    if len(own) == 1 < num_layers:  # grown as layers come: all alike
        own = own * num_layers
    windows: list[int | None] = []
    for index, kind in enumerate(kinds):
        layer = own[index] if index < len(own) else None
        if kind == "chunked_attention":
            raise _unsupported(index, kind, "attends within chunks of the context")
        if kind not in ("full_attention", "sliding_attention", "attention"):
            raise _unsupported(index, kind, "holds a state in which tokens cannot be told apart")
        if layer is not None and not _is_plain(layer):
            raise _unsupported(index, kind, f"is cached as {type(layer).__name__}")
        if isinstance(layer, DynamicSlidingWindowLayer):
            windows.append(int(layer.sliding_window))
        else:
            windows.append(None)
    return windows


def _is_plain(layer: Any) -> bool:
    from transformers.cache_utils import DynamicLayer

    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def _unsupported(index: int, kind: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"every layer must hold keys and values of its own, one for each token, but layer {index} "
        f"({kind}) {why}; a policy has nothing to choose there"
    )


def _find_attention(layer: nn.Module, index: int) -> nn.Module:
    """The one module of a layer that calls an attention function of Transformers."""
    found = [
        module
        for module in layer.modules()
        if getattr(module, "layer_idx", None) == index
        and hasattr(module, "config")
        and "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            "every decoder layer must have one module that calls Transformers' AttentionInterface"
            f", but {type(layer).__name__} at {index} has {len(found)}; the policy cannot see its "
            "queries"
        )
    return found[0]
