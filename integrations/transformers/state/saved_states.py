"""Save the states of recurrent layers in the file of a cache, and read and check them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.recurrent import RecurrentLayer, States

# Names of convolution states and recurrent states, before their numbers.
PARTS = ("conv", "recurrent")
_OF_KEYS = ("keys", "values", "positions", "queries", "carried", "columns")
# Held beside these, if a layer has an indexer.
OF_INDEX = ("index_keys", "index_beside")
# Held in place of these, if a layer attends to images.
OF_CROSS = ("image_keys", "image_values")
# A limit above the number of any layer, so that a damaged file cannot ask for much memory.
_MOST = 64


def state_tensors(layers: Sequence[PolicyLayer]) -> dict[str, Tensor]:
    """Return all recurrent states by their name in the file, such as ``layers.3.conv.0``."""
    return {
        f"layers.{index}.{part}.{number}": each
        for index, layer in enumerate(layers)
        if isinstance(layer, RecurrentLayer)
        for part, states in zip(PARTS, layer.states, strict=True)
        for number, each in states.items()
    }


def state_metadata(layers: Sequence[PolicyLayer]) -> dict[str, str]:
    """Describe, for a file, which states each recurrent layer holds and how many it may have.

    The result is empty if no layer is recurrent.
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
    """Read from a file how many states a layer may have, and the states it holds.

    The contents of the file must have been checked.

    Args:
        metadata: The file's strings by name.
        tensors: Its tensors by name.
        index: Index of the layer.
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
    """Check a file's recurrent states, and that no layer has a tensor of another kind of layer.

    Args:
        states: The file's description of them; see `state_metadata`.
        query_heads: One entry for each layer, None for a layer without keys.
        tensors: The file's tensors by name.
        batch: Number of rows.

    Raises:
        KeyError: A state is missing.
        ValueError: A description or tensor is wrong; the message names it.
    """
    if not isinstance(states, dict) or not all(map(_is_of_layer, states.values())):
        raise ValueError(f"states must map layers to numbers and names of states, got {states!r}")
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
    """True if ``found`` has the form in which `state_metadata` describes a layer's states."""
    if not isinstance(found, dict) or found.keys() != {"number", "held"}:
        return False
    number, held = found["number"], found["held"]
    if type(number) is not int or not 0 < number <= _MOST or not isinstance(held, list):
        return False
    names = {f"{part}.{each}" for part in PARTS for each in range(number)}
    return bool(held) and all(name in names for name in held)
