"""Name what the library relies on in Transformers and may change with its version.

These are the names of the cache argument, private attributes, and functions and classes that its
top level does not export. No other file of the library names them, so that the next change is a
change here. Each has the versions for which it is true; without any, it is true from 5.17 to 5.24.
Fields of models' own configurations are not among them.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionLayer,
    StaticLayer,
)
from transformers.generation import GenerationMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_masks_for_generate
from transformers.pytorch_utils import Conv1D

__all__ = [
    "ATTN_IMPLEMENTATION",
    "CACHE",
    "CACHE_NAMES",
    "CONTINUOUS_BATCHING",
    "DISTANCES",
    "EMPTY_LAYER",
    "MASKS_OF_STEP",
    "QUANTIZED",
    "CacheLayerMixin",
    "Conv1D",
    "DynamicLayer",
    "GenerationMode",
    "LinearAttentionLayer",
    "StaticLayer",
    "attention_functions",
    "cache_name",
    "cache_of",
    "calls_interface",
    "create_masks_for_generate",
    "given_cache",
    "names_in",
    "sdpa_attention_forward",
]

# The cache argument of modules and of `generate`: `cache` from 5.24 on, `past_key_values` before,
# and `cache_params` before in recurrent models and layers. From 5.24 on the earlier names are
# accepted with a warning, in modules until 5.40, in `generate` until 6.0.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@functools.lru_cache(maxsize=1024)
def cache_name(function: Callable[..., Any]) -> str | None:
    """Return under which name a function takes the cache; None if it takes none by name."""
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


# What the installed version calls the cache.
CACHE: str = cache_name(create_masks_for_generate) or CACHE_NAMES[0]


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call, whichever name it has; None without one."""
    given = {name: arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None}
    caches = list(given.values())
    if any(each is not caches[0] for each in caches):
        raise ValueError(
            f"{' and '.join(given)} are two names of one argument, the cache, and got different "
            f"objects; pass {CACHE} only"
        )
    return caches[0] if caches else None


def names_in(method: Any) -> tuple[Any, ...]:
    """Return the constants in the code of a method, among them the names that it looks up."""
    return tuple(inspect.unwrap(method).__code__.co_consts)


def cache_of(output: Any) -> Any:
    """Return the cache in the output of a model; None without one."""
    return next((output[name] for name in (CACHE, *CACHE_NAMES[1:]) if name in output), None)


# Attention. A module looks its function up in a global of its own file, by a name in its
# configuration; `eager` is another global of that file.
_INTERFACE, _EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"


# The attribute of a configuration that names the attention function.
ATTN_IMPLEMENTATION = "_attn_implementation"


@functools.lru_cache(maxsize=256)
def calls_interface(method: Any) -> bool:
    """True if a method looks up an attention function of Transformers."""
    return _INTERFACE in getattr(getattr(inspect.unwrap(method), "__code__", None), "co_names", ())


def attention_functions(forward: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the registry in which a module looks up its attention function, and its eager one.

    The registry is None if the module does not look one up.
    """
    own: Any = inspect.unwrap(forward)
    interface = own.__globals__.get(_INTERFACE) if calls_interface(own) else None
    return interface, own.__globals__.get(_EAGER)


# The argument of layers with the distance of each query to each key, `[query_len, key_len]`, in
# columns (Inkling 2). From 5.24 on; before, attention modules asked the cache for their columns.
DISTANCES = "relative_distance"

# Masks. A model may have a function of its own under this name.
MASKS_OF_STEP = "create_masks_for_generate"


# Cache layers.
# The layer that holds nothing; 5.17 has none, and needs none.
EMPTY_LAYER: Any = getattr(cache_utils, "DummyLayer", object)


# The quantised layer of each backend, and the axis along which it groups numbers of one head.
QUANTIZED: dict[str, tuple[Any, int]] = {
    "quanto": (cache_utils.QuantoQuantizedLayer, 0),
    "hqq": (cache_utils.HQQQuantizedLayer, 1),
}


# Every way into continuous batching starts with the second; the first ignores unknown arguments.
CONTINUOUS_BATCHING = ("generate_batch", "init_continuous_batching")
