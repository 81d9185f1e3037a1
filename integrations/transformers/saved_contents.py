"""Whether what a file of a cache holds fits together, before a cache is made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def check_contents(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Check that layers, tokens and metadata agree.

    Args:
        metadata: The file's strings by name.
        tensors: Its tensors by name.

    Raises:
        KeyError: Something is missing.
        ValueError: Something is not what it must be; names it.
    """
    query_heads = _read_json(metadata, "query_heads")
    if not isinstance(query_heads, list) or not query_heads:
        raise ValueError(f"query_heads must be a list with an entry a layer, got {query_heads!r}")
    for name in ("padded", "starts_turn"):
        if not isinstance(_read_json(metadata, name), bool):
            raise ValueError(f"{name} must be true or false, got {metadata[name]}")
    if not isinstance(_read_json(metadata, "policy"), dict):
        raise ValueError(f"policy must be the description of one, got {metadata['policy']}")
    lengths = _check_tokens(tensors)
    for index, heads in enumerate(query_heads):
        _check_layer(index, heads, tensors, lengths)
    for name, positions in tensors.items():
        group, _, layer = name.partition(".")
        if group == "propagated":
            if layer not in map(str, range(len(query_heads))):
                raise ValueError(
                    f"propagated must be of layers 0 to {len(query_heads) - 1}, got {name}"
                )
            _check_tensor(name, positions, torch.int64, len(lengths), None)
            _check_positions(name, positions, lengths)


def _read_json(metadata: Mapping[str, str], name: str) -> Any:
    try:
        return json.loads(metadata[name])
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} must be JSON, got {metadata[name]!r}: {error}") from None


def _check_tokens(tensors: Mapping[str, Tensor]) -> Tensor:
    """Check the tokens seen; returns each row's number of them."""
    valid, lengths = tensors["tokens.valid"], tensors["tokens.lengths"]
    _check_tensor("tokens.valid", valid, torch.bool, None, None)
    batch = len(valid)
    _check_tensor("tokens.lengths", lengths, torch.int64, batch)
    if not torch.equal(lengths, valid.sum(dim=1)):
        raise ValueError(
            f"tokens.lengths must be the numbers of valid tokens, {valid.sum(dim=1).tolist()}, "
            f"got {lengths.tolist()}"
        )
    appended = tensors["tokens.appended"]
    _check_tensor("tokens.appended", appended, torch.int64, batch, None)
    _check_positions("tokens.appended", appended, lengths)
    if "tokens.skipped" in tensors:
        _check_tensor("tokens.skipped", tensors["tokens.skipped"], torch.int64, batch)
    return lengths


def _check_layer(
    index: int, query_heads: object, tensors: Mapping[str, Tensor], lengths: Tensor
) -> None:
    names = [f"layers.{index}.{name}" for name in ("keys", "values", "positions")]
    keys, values, positions = (tensors[name] for name in names)
    if not keys.is_floating_point():
        raise ValueError(f"{names[0]} must be of floats, got {keys.dtype}")
    _check_tensor(names[0], keys, keys.dtype, len(lengths), None, None, None)
    _, kv_heads, kept_len, _ = keys.shape
    _check_tensor(names[1], values, keys.dtype, len(lengths), kv_heads, kept_len, None)
    chosen_len = kept_len - tensors["tokens.appended"].shape[1]
    _check_tensor(names[2], positions, torch.int64, len(lengths), kv_heads, chosen_len)
    _check_positions(names[2], positions, lengths)
    if not isinstance(query_heads, int) or query_heads < 1 or query_heads % max(kv_heads, 1):
        raise ValueError(
            f"query_heads must be a multiple of the {kv_heads} KV heads of layer {index}, got "
            f"{query_heads!r}"
        )


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    fits = tensor.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != dtype:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} must be {dtype} of shape [{wanted}], got {tensor.dtype} of shape "
            f"{list(tensor.shape)}"
        )


def _check_positions(name: str, positions: Tensor, lengths: Tensor) -> None:
    most = lengths.view(-1, *[1] * (positions.ndim - 1))
    if bool(((positions < -1) | (positions >= most)).any()):
        raise ValueError(
            f"{name} must be positions below the tokens of their rows, {lengths.tolist()}, or -1, "
            f"got {positions.tolist()}"
        )
