"""Check that the contents of a saved cache fit together, before a cache is made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpolicy.integrations.transformers.state.saved_states import OF_CROSS, OF_INDEX, check_states

# How many characters of invalid JSON an error shows.
_SHOWN = 80


def check_contents(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Check that a saved file's tensors and metadata agree with each other.

    Args:
        metadata: The file's strings by name.
        tensors: Its tensors by name.

    Raises:
        KeyError: A string or tensor is missing.
        ValueError: A string or tensor is wrong; the message names it.
    """
    query_heads = _read_json(metadata, "query_heads")
    if not isinstance(query_heads, list) or not query_heads:
        raise ValueError(f"query_heads must be a list with an entry a layer, got {query_heads!r}")
    for name in ("padded", "starts_turn"):
        if not isinstance(_read_json(metadata, name), bool):
            raise ValueError(f"{name} must be true or false, got {metadata[name]}")
    if not isinstance(_read_json(metadata, "policy"), dict):
        raise ValueError(f"policy must be the description of one, got {metadata['policy']}")
    _check_tensor("model.samples", tensors["model.samples"], torch.float32, None)
    acted = _check_tokens(tensors, padded=json.loads(metadata["padded"]))
    _check_since(metadata, tensors)
    unlike = _read_json(metadata, "head_sizes") if "head_sizes" in metadata else None
    _check_layers(query_heads, tensors, acted, unlike)
    _check_crosses(metadata, query_heads, tensors, len(acted))
    states = _read_json(metadata, "states") if "states" in metadata else {}
    check_states(states, query_heads, tensors, len(acted))
    _check_producers(
        _read_json(metadata, "producers") if "producers" in metadata else {}, query_heads
    )
    for name, positions in tensors.items():
        group, _, layer = name.partition(".")
        if group == "propagated":
            if layer not in map(str, range(len(query_heads))):
                raise ValueError(
                    f"propagated must be of layers 0 to {len(query_heads) - 1}, got {name}"
                )
            _check_tensor(name, positions, torch.int64, len(acted), None)
            _check_positions(name, positions, acted)


def _read_json(metadata: Mapping[str, str], name: str) -> Any:
    try:
        return json.loads(metadata[name])
    except (json.JSONDecodeError, RecursionError) as error:
        got = metadata[name] if len(metadata[name]) <= _SHOWN else metadata[name][:_SHOWN] + "..."
        raise ValueError(f"{name} must be JSON, got {got!r}: {error}") from None


def _check_producers(producers: object, query_heads: list[object]) -> None:
    """Check that a file's layers without keys name an earlier layer whose keys they attend to."""
    if not isinstance(producers, dict):
        raise ValueError(f"producers must map layers to layers, got {producers!r}")
    for layer, producer in producers.items():
        known = layer in map(str, range(len(query_heads))) and query_heads[int(layer)] is None
        earlier = known and type(producer) is int and 0 <= producer < int(layer)
        if not earlier or query_heads[producer] is None:
            raise ValueError(
                "producers must map layers without keys to earlier layers with keys, got "
                f"{producer!r} for layer {layer}"
            )


def _acted(lengths: Tensor, appended: Tensor) -> Tensor:
    """Return the number of tokens in each row on which the policy has acted, ``[batch]`` int64."""
    return lengths - (appended >= 0).sum(dim=1)


def _check_tokens(tensors: Mapping[str, Tensor], *, padded: bool) -> Tensor:
    """Check a file's record of seen tokens; return how many the policy has acted on, by row."""
    valid, lengths = tensors["tokens.valid"], tensors["tokens.lengths"]
    _check_tensor("tokens.valid", valid, torch.bool, None, None)
    batch = len(valid)
    if not valid.numel():
        raise ValueError(
            f"tokens.valid must have a row and a column at least, got shape {list(valid.shape)}"
        )
    if not (padded or bool(valid.all())):
        raise ValueError("padded must be true where tokens.valid is False anywhere, got false")
    _check_tensor("tokens.lengths", lengths, torch.int64, batch)
    if not torch.equal(lengths, valid.sum(dim=1)):
        raise ValueError(
            f"tokens.lengths must be the numbers of valid tokens, {valid.sum(dim=1).tolist()}, "
            f"got {lengths.tolist()}"
        )
    _check_tensor("tokens.ids", tensors["tokens.ids"], torch.int64, *valid.shape)
    if "tokens.kinds" in tensors:
        _check_tensor("tokens.kinds", tensors["tokens.kinds"], torch.int8, *valid.shape)
    appended = tensors["tokens.appended"]
    _check_appended(appended, valid)
    acted = _acted(lengths, appended)
    if "tokens.skipped" in tensors:
        skipped = tensors["tokens.skipped"]
        _check_tensor("tokens.skipped", skipped, torch.int64, batch)
        if bool(((skipped < 0) | (skipped > acted)).any()):
            raise ValueError(
                "tokens.skipped must be at least 0 and at most the tokens of prompts, "
                f"{acted.tolist()}, got {skipped.tolist()}"
            )
    return acted


def _check_since(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Check a file's count of each row's tokens since layers last evicted, if it has one."""
    if "rows_since" not in metadata:
        return
    since, lengths = _read_json(metadata, "rows_since"), tensors["tokens.lengths"].tolist()
    appended = (tensors["tokens.appended"] >= 0).sum(dim=1).tolist()
    fits = isinstance(since, list) and len(since) == len(lengths)
    if not fits or not all(
        type(count) is int and least <= count <= most
        for count, least, most in zip(since, appended, lengths, strict=True)
    ):
        raise ValueError(
            "rows_since must be a list with the number of tokens of each row since layers chose, "
            f"at least the {appended} that were appended and at most all {lengths}, got {since!r}"
        )


def _check_appended(appended: Tensor, valid: Tensor) -> None:
    """Check that a file's ``appended`` are the positions of the last columns read.

    See `SeenTokens` for how positions are counted.
    """
    _check_tensor("tokens.appended", appended, torch.int64, len(valid), None)
    if appended.shape[1] >= valid.shape[1]:
        raise ValueError(
            f"tokens.appended must be fewer columns than the {valid.shape[1]} of tokens.valid, the "
            f"first of which are a prompt's, got {appended.shape[1]}"
        )
    positions = (valid.cumsum(dim=1) - 1).masked_fill(~valid, -1)
    last = positions[:, valid.shape[1] - appended.shape[1] :]
    unlike = (appended != last).nonzero()
    if len(unlike):
        row, column = unlike[0].tolist()
        raise ValueError(
            "tokens.appended must be the positions of the last columns of tokens.valid, -1 on "
            f"padding: {int(last[row, column])} in row {row}, column {column}, got "
            f"{int(appended[row, column])}"
        )


def _check_layers(
    query_heads: list[object], tensors: Mapping[str, Tensor], acted: Tensor, unlike: object
) -> None:
    """Check the tensors of every layer in a file, and that their sizes fit one model.

    Args:
        query_heads: One entry for each layer, None for a layer without keys.
        tensors: The file's tensors by name.
        acted: ``[batch]``, tokens that the policy has acted on.
        unlike: If layers differ in their head sizes, the sizes of each layer; else None.
    """
    if unlike is not None and (not isinstance(unlike, list) or len(unlike) != len(query_heads)):
        raise ValueError(f"head_sizes must be a list with an entry a layer, got {unlike!r}")
    first: tuple[int, ...] | None = None
    for index, heads in enumerate(query_heads):
        if heads is None:  # a layer without keys
            continue
        sizes = _check_layer(index, heads, tensors, acted)
        first = first or sizes
        if unlike is None and sizes != first:
            raise ValueError(
                "query heads, KV heads, head_dim of keys and head_dim of values must be the same "
                f"in every layer, {first} in layer 0, got {sizes} in layer {index}"
            )
        if isinstance(unlike, list) and list(sizes) != unlike[index]:
            raise ValueError(
                "query heads, KV heads, head_dim of keys and head_dim of values must be those of "
                f"head_sizes, {unlike[index]} in layer {index}, got {list(sizes)}"
            )
    for name in tensors:
        group, _, rest = name.partition(".")
        if group == "layers" and rest.split(".")[0] not in map(str, range(len(query_heads))):
            raise ValueError(
                f"query_heads must have an entry for each layer, got {len(query_heads)} of them "
                f"and {name}"
            )


def _check_layer(
    index: int, query_heads: object, tensors: Mapping[str, Tensor], acted: Tensor
) -> tuple[int, ...]:
    """Check one layer's tensors in a file; return its numbers of heads and head dimensions."""
    names = [f"layers.{index}.{name}" for name in ("keys", "values", "positions")]
    keys, values, positions = (tensors[name] for name in names)
    if not keys.is_floating_point():
        raise ValueError(f"{names[0]} must be of floats, got {keys.dtype}")
    _check_tensor(names[0], keys, keys.dtype, len(acted), None, None, None)
    _, kv_heads, kept_len, _ = keys.shape
    _check_tensor(names[1], values, keys.dtype, len(acted), kv_heads, kept_len, None)
    # In latent attention the rotary part takes the place of values, and may be empty.
    whole = f"layers.{index}.{OF_INDEX[0]}" in tensors
    for name, tensor in zip(names[:2], (keys, values), strict=True):
        if not (kv_heads and (tensor.shape[3] or (whole and tensor is values))):
            raise ValueError(
                f"{name} must have at least one KV head and a head_dim of at least 1, got shape "
                f"{list(tensor.shape)}"
            )
    _check_index(index, tensors, keys)
    chosen_len = kept_len - tensors["tokens.appended"].shape[1]
    choices = 1 if positions.ndim > 1 and positions.shape[1] == 1 else kv_heads
    _check_tensor(names[2], positions, torch.int64, len(acted), choices, chosen_len)
    _check_positions(names[2], positions, acted)
    if type(query_heads) is not int or query_heads < 1 or query_heads % kv_heads:
        raise ValueError(
            f"query_heads must be a multiple of the {kv_heads} KV heads of layer {index}, at least "
            f"1, got {query_heads!r}"
        )
    _check_observed(index, query_heads, tensors, (len(acted), chosen_len))
    return query_heads, kv_heads, keys.shape[3], values.shape[3]


def _check_observed(
    index: int, query_heads: int, tensors: Mapping[str, Tensor], sizes: tuple[int, int]
) -> None:
    """Check the decoded queries and the scorer state that a file has for a layer.

    ``sizes`` are the number of rows, and the number of tokens that the policy kept.
    """
    (batch, chosen_len), seen = sizes, tensors["tokens.valid"].shape[1]
    queries = tensors.get(f"layers.{index}.queries")
    if queries is not None:
        name = f"layers.{index}.queries"
        _check_tensor(name, queries, queries.dtype, batch, query_heads, None, None)
        if not queries.is_floating_point() or queries.shape[2] > seen:
            raise ValueError(
                f"{name} must be floats of at most the {seen} columns seen, got {queries.dtype} of "
                f"shape {list(queries.shape)}"
            )
    columns = tensors.get(f"layers.{index}.columns")
    if columns is not None:
        name, count = f"layers.{index}.columns", 0 if queries is None else queries.shape[2]
        _check_tensor(name, columns, torch.int64, batch, count)
        if count and not -1 <= int(columns.min()) <= int(columns.max()) < seen:
            raise ValueError(f"{name} must be in [-1, {seen - 1}], got {columns.tolist()}")
    carried = tensors.get(f"layers.{index}.carried")
    if carried is not None:
        name = f"layers.{index}.carried"
        _check_tensor(name, carried, torch.float32, batch, None, chosen_len, None)
        if not carried.shape[1] or query_heads % carried.shape[1]:
            raise ValueError(
                f"{name} must be of heads that share {query_heads} query heads, got "
                f"{carried.shape[1]}"
            )


def _check_crosses(
    metadata: Mapping[str, str],
    query_heads: list[object],
    tensors: Mapping[str, Tensor],
    batch: int,
) -> None:
    """Check a file's image keys and values: one shape for both, or absent."""
    crosses = _read_json(metadata, "crosses")
    fits = isinstance(crosses, list) and len(crosses) == len(query_heads)
    wrong = [
        index
        for index, each in enumerate(crosses if fits else [])
        if not isinstance(each, bool) or (each and query_heads[index] is not None)
    ]
    if not fits or wrong:
        raise ValueError(
            f"crosses must be true for some layers without query_heads, false for the others, got "
            f"{crosses!r}"
        )
    for index, heads in enumerate(query_heads):
        names = [f"layers.{index}.{name}" for name in OF_CROSS]
        if heads is not None or not any(name in tensors for name in names):
            continue
        if not crosses[index]:
            raise ValueError(f"{names[0]} must be of a layer that attends to images, got {index}")
        keys, values = (tensors[name] for name in names)
        _check_tensor(names[0], keys, keys.dtype, batch, None, None, None)
        _check_tensor(names[1], values, keys.dtype, *keys.shape)


def _check_index(index: int, tensors: Mapping[str, Tensor], keys: Tensor) -> None:
    """Check that a layer with an indexer has index keys and position ids for all its slots."""
    names = [f"layers.{index}.{name}" for name in OF_INDEX]
    if not any(name in tensors for name in names):
        return
    index_keys, beside = (tensors[name] for name in names)
    _check_tensor(names[0], index_keys, keys.dtype, len(keys), 1, keys.shape[2], None)
    _check_tensor(names[1], beside, beside.dtype, len(keys), 1, keys.shape[2], None)


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


def _check_positions(name: str, positions: Tensor, acted: Tensor) -> None:
    """Check a file's positions of kept tokens: -1 first, then ascending and below ``acted``."""
    most = acted.view(-1, *[1] * (positions.ndim - 1))
    if bool(((positions < -1) | (positions >= most)).any()):
        raise ValueError(
            f"{name} must be positions below the tokens of prompts in their rows, "
            f"{acted.tolist()}, or -1, got {positions.tolist()}"
        )
    before, after = positions[..., :-1], positions[..., 1:]
    unordered = (before >= 0) & (after <= before)
    if bool(unordered.any()):
        place = tuple(unordered.nonzero()[0].tolist())
        raise ValueError(
            f"{name} must ascend in every row and head, with -1 on the left only, got "
            f"{int(after[place])} after {int(before[place])} in row {place[0]}"
        )
