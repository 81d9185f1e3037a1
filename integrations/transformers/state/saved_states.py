"""The states of recurrent layers, as the file of a cache has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.recurrent import RecurrentLayer, States

# What the states of convolutions and the others are called, before their numbers.
PARTS = ("conv", "recurrent")
_OF_KEYS = ("keys", "values", "positions", "queries", "carried", "columns")
# Beside them, where a layer has an indexer.
OF_INDEX = ("index_keys", "index_beside")
# In the place of them, where a layer attends to images.
OF_CROSS = ("image_keys", "image_values")
# More than any layer has, so that a broken file makes no room for what is not there.
_MOST = 64


def state_tensors(layers: Sequence[PolicyLayer]) -> dict[str, Tensor]:
    """Every state by its name in a file, such as ``layers.3.conv.0``."""
    return {
        f"layers.{index}.{part}.{number}": each
        for index, layer in enumerate(layers)
        if isinstance(layer, RecurrentLayer)
        for part, states in zip(PARTS, layer.states, strict=True)
        for number, each in states.items()
    }


def state_metadata(layers: Sequence[PolicyLayer]) -> dict[str, str]:
    """By layer, how many states it may have, and the names of those that it holds.

    Nothing where no layer is recurrent.
    """
    found = {
        str(index): {
            "number": layer.number_of_states,
            "held": [
                f"{part}.{number}"
                for part, states in zip(PARTS, layer.states, strict=True)
                for number in states
            ],
        }
        for index, layer in enumerate(layers)
        if isinstance(layer, RecurrentLayer)
    }
    return {"states": json.dumps(found)} if found else {}


def read_states(
    metadata: Mapping[str, str], tensors: Mapping[str, Tensor], index: int
) -> tuple[int, States, States]:
    """How many states a layer may have, and those it holds; of contents that were checked.

    Args:
        metadata: The file's strings by name.
        tensors: Its tensors by name.
        index: The layer's.
    """
    of_layer = json.loads(metadata.get("states", "{}")).get(str(index), {"number": 0})
    found: list[States] = []
    for part in PARTS:
        prefix = f"layers.{index}.{part}."
        names = [name for name in tensors if name.startswith(prefix)]
        found.append({int(name.removeprefix(prefix)): tensors[name] for name in names})
    return of_layer["number"], found[0], found[1]


def check_states(
    states: object, query_heads: Sequence[object], tensors: Mapping[str, Tensor], batch: int
) -> None:
    """Check the states of layers, and that no layer holds what it is not to hold.

    Args:
        states: What the file says of them.
        query_heads: An entry a layer, None without keys.
        tensors: The file's tensors by name.
        batch: Rows.

    Raises:
        KeyError: A state is missing.
        ValueError: Something is not what it must be; names it.
    """
    if not isinstance(states, dict) or not all(map(_is_of_layer, states.values())):
        raise ValueError(f"states must tell numbers and names of states by layer, got {states!r}")
    unlike = [layer for layer in states if layer not in map(str, range(len(query_heads)))]
    if unlike:
        raise ValueError(
            f"states must be of layers 0 to {len(query_heads) - 1}, got layers {unlike}"
        )
    named = {
        f"layers.{layer}.{name}" for layer, of_layer in states.items() for name in of_layer["held"]
    }
    for name in sorted(named):
        each = tensors[name]
        if not each.is_floating_point() or each.ndim < 2 or len(each) != batch:
            raise ValueError(
                f"{name} must be of floats, of shape [{batch}, ...], got {each.dtype} of shape "
                f"{list(each.shape)}"
            )
    without_keys = {str(index) for index, heads in enumerate(query_heads) if heads is None}
    for name in tensors:
        group, _, rest = name.partition(".")
        layer, _, what = rest.partition(".")
        of_keys: tuple[str, ...] = (*_OF_KEYS, *OF_INDEX)
        if layer in without_keys:
            of_keys = () if layer in states else OF_CROSS
        if group == "layers" and name not in named and what not in of_keys:
            raise ValueError(f"{name} must be something that its layer holds, got {what!r}")


def _is_of_layer(found: Any) -> bool:
    """Whether this is what `state_metadata` says of a layer; a state has one of its convolution."""
    if not isinstance(found, dict) or found.keys() != {"number", "held"}:
        return False
    number, held = found["number"], found["held"]
    if type(number) is not int or not 0 < number <= _MOST or not isinstance(held, list):
        return False
    names = {f"{part}.{each}" for part in PARTS for each in range(number)}
    return bool(held) and all(name in names for name in held)
