"""Support layers with their own attention function, whose queries cannot be observed.

Such layers (in Falcon, GPT-Neo, XGLM and others) call no function of `AttentionInterface`.
Their keys and values still go through the cache. A policy that needs no queries can choose among
them when the cache gets them. The layer attends to all of them in that forward.

Policies that look at queries, or restart, are refused before anything is computed. The self-check
always runs on these models, with the two policies below; its dense attention is the model's own,
under a mask given to the layer. The layers always run for all tokens that reach them, and nothing
is compiled. Layers are refused if they count in columns (alibi and other biases of scores, blocks),
but a local window in columns (GPT-Neo) is allowed: columns are never further apart than positions,
so that the mask, which is made from positions, hides at least as much.
"""

import inspect
import types
import typing
from typing import Any

from torch import nn
from transformers import Cache

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.model.modules import signature
from kvpolicy.integrations.transformers.surface import CACHE, cache_name
from kvpolicy.policies import KeyNormScorer, StreamingLLM, TokenSelectivePropagation
from kvpolicy.policy import CachePolicy

# The policies with which such a model is checked. All heads keep the same tokens, since some models
# take one mask for all heads.
EVICTING = StreamingLLM(retention_rate=0.5)
_DROP = TokenSelectivePropagation(tsp_rate=0.7, window_size=4)
DROPPING = CachePolicy(KeyNormScorer(), EVICTING.selector, _DROP)

# Parts of the names of arguments that are added to scores by column.
_BIASES = ("alibi", "position_bias", "relative_position")


def check_layer(layer: nn.Module, decoder: nn.Module) -> None:
    """Check that policies work with a layer whose attention function cannot be observed."""
    config: Any = decoder.config
    if not takes_cache(decoder):
        raise UnsupportedModelError(without_cache(decoder))
    kind = getattr(config, "attention_type", None)
    if isinstance(kind, str) and "sparse" in kind:
        raise UnsupportedModelError(
            "a layer with an attention function of its own must see the whole context, but "
            f"attention_type is {kind!r}, which attends to blocks of columns"
        )
    bias = None if getattr(config, "alibi", None) is False else column_bias(layer)
    if bias is not None:
        raise UnsupportedModelError(bias)


def without_cache(decoder: nn.Module) -> str:
    """Return the error message for a model that takes no cache."""
    return (
        f"model must take a cache of Transformers, as {CACHE}, in which a policy chooses, but "
        f"{type(decoder).__name__} does not"
    )


def takes_cache(decoder: nn.Module) -> bool:
    """True if a decoder can be called with a cache of Transformers, as far as it says."""
    kinds = _annotated(decoder)
    return kinds is not None and (not kinds or any(issubclass(each, Cache) for each in kinds))


def takes_own_caches_only(decoder: nn.Module) -> bool:
    """True if a decoder's type annotations ask for a cache class defined by its own module."""
    kinds = [each for each in _annotated(decoder) or () if issubclass(each, Cache)]
    return any(each.__module__ == type(decoder).__module__ for each in kinds)


def _annotated(decoder: nn.Module) -> list[type] | None:
    """Return the classes that annotate a decoder's cache argument; None if it has no such one."""
    forward = type(decoder).forward
    name = cache_name(forward)
    if name is None:
        return None
    named = signature(forward).parameters[name].annotation
    said = [typing.get_origin(each) or each for each in (named, *typing.get_args(named))]
    others = (types.UnionType, type(None), inspect.Parameter.empty)
    return [each for each in said if isinstance(each, type) and each not in others]


def column_bias(layer: nn.Module) -> str | None:
    """Describe the argument that adds a bias by column, wrong after eviction; None without one."""
    for name in signature(type(layer).forward).parameters:
        if any(each in name for each in _BIASES):
            return (
                "attention scores must not depend on the columns of keys, but "
                f"{type(layer).__name__} adds {name} to them"
            )
    return None


def check_policy(model: nn.Module, policy: CachePolicy) -> None:
    """Check that a policy needs no queries, in a model whose queries cannot be observed."""
    name = type(model).__name__
    if policy.num_queries != 0 or policy.propagation.restarts or policy.rereading is not None:
        looks = policy.num_queries != 0 or policy.rereading is not None
        asks = "reads queries" if looks else "restarts the prefill"
        raise UnsupportedModelError(
            f"{policy} cannot be applied to {name}, whose attention does not go through "
            f"Transformers' AttentionInterface and shows no queries: it {asks}; use a policy that "
            "does not, such as StreamingLLM, KeyNorm or KeyDiff"
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise UnsupportedModelError(
            f"{name} must run in one process, since its attention does not show which heads a "
            "process computes; load it without tensor parallelism"
        )
