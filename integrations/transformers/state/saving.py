"""Save a cache to a file, with its policy and the fingerprint of its model, and load it.

Everything but the tensors is one text in JSON. The text has a digest of every tensor, and the file
one of the text, so that a file that was changed or damaged is refused before a cache is made of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvpolicy.checks import check_kind
from kvpolicy.description import Description, describe, from_description
from kvpolicy.integrations.transformers.state.fingerprint import ModelFingerprint
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.recurrent import LAYERS, link
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.integrations.transformers.state.whole_file import check_target, digest_of, write_whole
from kvpolicy.policy import CachePolicy

FORMAT = "kvpolicy-cache"
VERSION = "1"
# What the parts of a file raise that has the right digests, but was not written by `save`.
UNFIT = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


@attrs.frozen(eq=False)
class SavedCache:
    """A cache as it is written to a file and read from one.

    ``starts_turn`` says if the policy acts on the next forward.
    """

    policy: Description
    model: ModelFingerprint
    tokens: SeenTokens
    layers: list[PolicyLayer]
    propagated: dict[int, Tensor]
    starts_turn: bool

    def write(self, path: str | os.PathLike[str], **beside: str) -> None:
        """Write the cache to a file; leave no partial file if that fails."""
        _check_path(path)
        check_target(path)  # before tensors are copied
        model, samples = self.model.packed()
        seen = attrs.asdict(self.tokens, recurse=False)
        found = {"model.samples": samples}
        found |= {f"tokens.{n}": each for n, each in seen.items() if isinstance(each, Tensor)}
        found |= {f"propagated.{index}": each for index, each in self.propagated.items()}
        for index, layer in enumerate(self.layers):
            found |= {f"layers.{index}.{name}": each for name, each in layer.tensors().items()}
        # The format does not allow two names for one storage, so that every tensor is copied.
        tensors = {
            name: each.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, each in found.items()
        }
        contents = {
            "policy": self.policy,
            "model": model,
            "tokens": {n: each for n, each in seen.items() if not isinstance(each, Tensor)},
            "layers": [
                [type(layer).__name__, layer.settings(), layer.facts.query_heads]
                for layer in self.layers
            ],
            "starts_turn": self.starts_turn,
            "digests": {name: digest_of(each) for name, each in tensors.items()},
        }
        text = json.dumps(contents)
        metadata = {"format": FORMAT, "version": VERSION, "contents": text, "digest": _digest(text)}
        write_whole(path, tensors, metadata | beside)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> SavedCache:
        """Read a saved cache from a file, with all tensors on the CPU."""
        _check_path(path)
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(f"path must be a regular file, got {path}")
        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
                    raise ValueError(
                        f"path must be a file of PolicyCache.save, version {VERSION}, got {path} "
                        f"with format {metadata.get('format')} {metadata.get('version', '')}"
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"path must be a file of PolicyCache.save, got {path}: {error}"
            ) from None
        try:
            return _rebuilt(_checked(metadata, tensors), tensors)
        except (*UNFIT, RecursionError) as error:
            lacks = "it lacks " if isinstance(error, KeyError) else ""
            raise ValueError(
                f"path must be a whole file of PolicyCache.save, got {path}: {lacks}{error}"
            ) from None

    def policy_of(self, path: str | os.PathLike[str], policy: CachePolicy | None) -> CachePolicy:
        """Return the policy that filled the saved cache: the given one, or built from the file."""
        try:
            own = from_description(self.policy)
        except (ValueError, RecursionError) as error:
            own = None
            if policy is None:
                raise ValueError(f"policy must be given to load {path}: {error}") from None
        if policy is None:
            assert own is not None
            return own
        check_kind("policy", policy, CachePolicy)
        if describe(policy) != self.policy:
            raise ValueError(
                f"policy must be the one that filled the cache in {path}, which is "
                f"{own or self.policy}, got {policy}"
            )
        return policy


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_path(path: object) -> None:
    """Check that ``path`` is a str or an `os.PathLike`.

    Otherwise `os.stat` would take an int for an open file.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or os.PathLike, got {path!r}")


def _checked(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a file's contents after a check that all of it is as it was written."""
    text = metadata["contents"]
    if _digest(text) != metadata["digest"]:
        raise ValueError("its contents were changed after it was written")
    contents: dict[str, Any] = json.loads(text)
    digests = contents["digests"]
    for name in (*digests, *tensors):
        if digest_of(tensors[name]) != digests.get(name):
            raise ValueError(f"{name} was changed after it was written")
    return contents


def _rebuilt(contents: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SavedCache:
    def under(group: str) -> dict[str, Tensor]:
        found = {name: each for name, each in tensors.items() if name.startswith(f"{group}.")}
        return {name.removeprefix(f"{group}."): each for name, each in found.items()}

    since = contents["tokens"].pop("rows_since")
    since = None if since is None else tuple(since)
    tokens = SeenTokens(**(contents["tokens"] | under("tokens")), rows_since=since)
    layers: list[PolicyLayer] = []
    for index, (kind, settings, query_heads) in enumerate(contents["layers"]):
        layer = LAYERS[kind](**settings)
        layer.facts.query_heads = query_heads
        layer.hold_tensors(under(f"layers.{index}"), tokens)
        layers.append(layer)
    link(layers)
    return SavedCache(
        contents["policy"],
        ModelFingerprint.unpacked(contents["model"], tensors["model.samples"]),
        tokens,
        layers,
        {int(index): each for index, each in under("propagated").items()},
        contents["starts_turn"],
    )
