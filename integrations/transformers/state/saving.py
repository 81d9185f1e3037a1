"""Save a cache to a file, with its policy and the fingerprint of its model, and load it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvpolicy.checks import check_kind
from kvpolicy.description import Description, describe, from_description
from kvpolicy.integrations.transformers.state.cross import CrossLayer
from kvpolicy.integrations.transformers.state.fingerprint import ModelFingerprint
from kvpolicy.integrations.transformers.state.held_counts import held_counts
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.recent_queries import RecentQueries
from kvpolicy.integrations.transformers.state.recurrent import (
    EmptyLayer,
    RecurrentLayer,
    SharedLayer,
    SideBySideLayer,
    link,
)
from kvpolicy.integrations.transformers.state.saved_contents import check_contents
from kvpolicy.integrations.transformers.state.saved_states import (
    OF_CROSS,
    OF_INDEX,
    read_states,
    state_metadata,
    state_tensors,
)
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.integrations.transformers.state.whole_file import check_target, write_whole
from kvpolicy.policy import CachePolicy

FORMAT = "kvpolicy-cache"
VERSION = 1


@attrs.frozen(eq=False)
class SavedCache:
    """A cache as it is written to a file and read from one.

    Args:
        policy: The policy's description.
        model: The fingerprint of the model that filled the cache.
        tokens: The tokens seen.
        layers: The layers of the cache.
        propagated: See `PolicyCache.propagated`.
        starts_turn: Whether the policy acts on the next forward.
    """

    policy: Description
    model: ModelFingerprint
    tokens: SeenTokens
    layers: list[PolicyLayer]
    propagated: dict[int, Tensor]
    starts_turn: bool

    def write(self, path: str | os.PathLike[str], **beside: str) -> None:
        """Write the cache to a file; leave no partial file if that fails.

        Args:
            path: The file.
            beside: Further texts for the file by name, which `read` does not look at.

        Raises:
            TypeError: ``path`` is no path.
            OSError: The file cannot be written, or ``path`` exists and is not a regular file.
            ValueError: ``path`` is empty.
        """
        _check_path(path)
        check_target(path)  # before tensors are copied
        model, samples = self.model.packed()
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "policy": json.dumps(self.policy),
            "model": model,
            "query_heads": json.dumps([layer.facts.query_heads or None for layer in self.layers]),
            "padded": json.dumps(self.tokens.padded),
            "starts_turn": json.dumps(self.starts_turn),
            **state_metadata(self.layers),
            "crosses": json.dumps([isinstance(each, CrossLayer) for each in self.layers]),
            **_producer_metadata(self.layers),
            **_size_metadata(self.layers),
            **_since_metadata(self.tokens),
            **beside,
        }
        write_whole(path, {**self._tensors(), "model.samples": samples}, metadata)

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            held, positions = layer.held, layer.contents.chosen
            if held is not None and positions is not None:
                found[f"layers.{index}.keys"], found[f"layers.{index}.values"] = held.read()
                found[f"layers.{index}.positions"] = positions
            for name in ("queries", "carried", "columns"):
                if getattr(layer.observed, name) is not None:
                    found[f"layers.{index}.{name}"] = getattr(layer.observed, name)
            if isinstance(layer, CrossLayer) and layer.images is not None:
                names = (f"layers.{index}.{name}" for name in OF_CROSS)
                found |= dict(zip(names, layer.images, strict=True))
            if isinstance(layer, IndexedLayer) and held is not None:
                names = (f"layers.{index}.{name}" for name in OF_INDEX)
                found |= dict(zip(names, layer.index_tensors(), strict=True))
        found |= state_tensors(self.layers)
        for name in ("valid", "ids", "lengths", "appended", "skipped", "kinds"):
            if getattr(self.tokens, name) is not None:
                found[f"tokens.{name}"] = getattr(self.tokens, name)
        for index, positions in self.propagated.items():
            found[f"propagated.{index}"] = positions
        # The format does not allow two names for one storage, so that every tensor is copied.
        return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}

    @staticmethod
    def read(path: str | os.PathLike[str]) -> SavedCache:
        """Read a saved cache from a file, with all tensors on the CPU.

        Raises:
            TypeError: ``path`` is no path.
            OSError: The file cannot be read, or is not a regular file.
            ValueError: The file is not a saved cache or has another version, or its contents do not
                fit together.
        """
        _check_path(path)
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(f"path must be a regular file, got {path}")
        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT or metadata.get("version") != str(VERSION):
                    raise ValueError(
                        f"path must be a file of PolicyCache.save, version {VERSION}, got {path} "
                        f"with format {metadata.get('format')} {metadata.get('version', '')}"
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise _broken(path, error) from None
        try:
            check_contents(metadata, tensors)
            return _rebuilt(metadata, tensors)
        except KeyError as error:
            raise ValueError(
                f"path must be a whole file of PolicyCache.save, {path} lacks {error}"
            ) from None
        except ValueError as error:
            raise _broken(path, error) from None

    def policy_of(self, path: str | os.PathLike[str], policy: CachePolicy | None) -> CachePolicy:
        """Return the policy that filled the saved cache: the given one, or built from the file.

        Args:
            path: The file, for messages.
            policy: The policy, if it is given; else it is built from its description.

        Raises:
            TypeError: ``policy`` is not a `CachePolicy`.
            ValueError: ``policy`` is a different one, or is None though it must be given; or the
                scorer state in the layers is not of the policy's scorer; or layers hold other
                numbers of tokens than a ``gapless`` policy needs.
        """
        try:
            policy = self._built_policy(path) if policy is None else self._same(path, policy)
        except RecursionError as error:
            raise _broken(path, f"policy is nested too deeply: {error}") from None
        carries = 0 if policy.decoding is None else policy.decoding.state_size
        for index, layer in enumerate(self.layers):
            carried = layer.observed.carried
            if carried is not None and carried.shape[3] != carries:
                raise _broken(
                    path,
                    f"layers.{index}.carried must hold the {carries} numbers a key that the "
                    f"policy's scorer carries, got {carried.shape[3]}",
                )
        if policy.gapless:
            self._check_gapless(path)
        return policy

    def _check_gapless(self, path: str | os.PathLike[str]) -> None:
        """Check that rotary positions continue directly after the tokens held, without gaps."""
        lengths, skipped = self.tokens.lengths, self.tokens.skipped
        skipped = torch.zeros_like(lengths) if skipped is None else skipped
        holding = [layer for layer in self.layers if layer.held is not None]
        for counts in held_counts(holding, lengths) if holding else ():
            if not torch.equal(lengths - counts, skipped):
                raise _broken(
                    path,
                    "tokens.skipped must be the number of each row's tokens that no head holds, "
                    f"if the policy is gapless, {(lengths - counts).tolist()}, got "
                    f"{skipped.tolist()}",
                )

    def _built_policy(self, path: str | os.PathLike[str]) -> CachePolicy:
        try:
            return from_description(self.policy)
        except ValueError as error:
            raise ValueError(f"policy must be given to load {path}: {error}") from None

    def _same(self, path: str | os.PathLike[str], policy: CachePolicy) -> CachePolicy:
        if describe(policy) != self.policy:
            raise ValueError(
                f"policy must be the one that filled the cache in {path}, which is "
                f"{_named(self.policy)}, got {policy}"
            )
        check_kind("policy", policy, CachePolicy)  # a file may describe a single part
        return policy


def _named(description: Description) -> str:
    """Return a saved policy as code, or its raw description if it cannot be built."""
    try:
        return str(from_description(description))
    except ValueError:
        return str(description)


def _broken(path: str | os.PathLike[str], error: object) -> ValueError:
    return ValueError(f"path must be a file of PolicyCache.save, got {path}: {error}")


def _check_path(path: object) -> None:
    """Check that ``path`` is a str or an `os.PathLike`.

    Otherwise `os.stat` would take an int for an open file.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or os.PathLike, got {path!r}")


def _producer_metadata(layers: Sequence[PolicyLayer]) -> dict[str, str]:
    """Describe, for a file, which layers attend to another layer's keys; empty if none do."""
    found = {i: each.producer for i, each in enumerate(layers) if each.producer is not None}
    return {"producers": json.dumps(found)} if found else {}


def _since_metadata(tokens: SeenTokens) -> dict[str, str]:
    """Describe `SeenTokens.rows_since` for a file; empty if it is None."""
    return {} if tokens.rows_since is None else {"rows_since": json.dumps(tokens.rows_since)}


def _size_metadata(layers: Sequence[PolicyLayer]) -> dict[str, str]:
    """Describe each layer's head counts and head dimensions for a file; empty if all are equal."""
    sizes = [_sizes(layer) for layer in layers]
    alike = len({each for each in sizes if each is not None}) <= 1
    return {} if alike else {"head_sizes": json.dumps(sizes)}


def _sizes(layer: PolicyLayer) -> tuple[int, ...] | None:
    held = layer.held
    return None if held is None else (layer.facts.query_heads, held.shape[1], *held.widths)


def _rebuilt(metadata: dict[str, str], tensors: dict[str, Tensor]) -> SavedCache:
    ids, appended = tensors["tokens.ids"], tensors["tokens.appended"]
    acted_len = ids.shape[1] - appended.shape[1]
    since = json.loads(metadata.get("rows_since", "null"))
    tokens = SeenTokens(
        valid=tensors["tokens.valid"],
        lengths=tensors["tokens.lengths"],
        appended=appended,
        acted_ids=ids[:, :acted_len],
        appended_ids=ids[:, acted_len:],
        padded=json.loads(metadata["padded"]),
        skipped=tensors.get("tokens.skipped"),
        kinds=tensors.get("tokens.kinds"),
        rows_since=None if since is None else tuple(since),
    )
    layers: list[PolicyLayer] = []
    crosses = json.loads(metadata["crosses"])
    producers = json.loads(metadata.get("producers", "{}"))
    for index, query_heads in enumerate(json.loads(metadata["query_heads"])):
        number, *states = read_states(metadata, tensors, index)
        if number:
            of_kind = RecurrentLayer if query_heads is None else SideBySideLayer
            layer: PolicyLayer = of_kind(number_of_states=number)
            assert isinstance(layer, RecurrentLayer)
            layer.hold_states(*states)
        elif crosses[index]:
            layer = CrossLayer()
            of_cross = [tensors.get(f"layers.{index}.{name}") for name in OF_CROSS]
            if of_cross[0] is not None and of_cross[1] is not None:
                layer.hold_images((of_cross[0], of_cross[1]))
        elif query_heads is None:
            producer = producers.get(str(index))
            layer = EmptyLayer() if producer is None else SharedLayer(producer=producer)
        else:
            indexed = f"layers.{index}.{OF_INDEX[0]}" in tensors
            layer = IndexedLayer() if indexed else PolicyLayer()
        if query_heads is not None:
            names = ("keys", "values", "positions")
            keys, values, positions = (tensors[f"layers.{index}.{name}"] for name in names)
            layer.load(keys, values, positions, tokens)
            if isinstance(layer, IndexedLayer):
                layer.load_index(*(tensors[f"layers.{index}.{name}"] for name in OF_INDEX))
            layer.facts.query_heads = query_heads
            queries, carried, columns = (
                tensors.get(f"layers.{index}.{name}") for name in ("queries", "carried", "columns")
            )
            layer.observed = RecentQueries(queries, tokens.seen, carried, columns)
        layers.append(layer)
    link(layers)
    propagated = {
        int(name.partition(".")[2]): tensor
        for name, tensor in tensors.items()
        if name.startswith("propagated.")
    }
    return SavedCache(
        json.loads(metadata["policy"]),
        ModelFingerprint.unpacked(metadata["model"], tensors["model.samples"]),
        tokens,
        layers,
        propagated,
        json.loads(metadata["starts_turn"]),
    )
