"""Define `ServedDocument`: the file of a compressed document, and the requests that name it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.description import Description
from kvpolicy.integrations.transformers.state.fingerprint import ModelFingerprint
from kvpolicy.integrations.transformers.state.whole_file import bytes_of, write_whole
from kvpolicy.integrations.vllm.files import DocumentError, TensorFile
from kvpolicy.integrations.vllm.matching import misfit

FORMAT, VERSION = "kvpolicy-document", "1"
SUFFIX = ".safetensors"
# The field of `kv_transfer_params` in which a request names its document.
PARAMETER = "kvpolicy_document"
SALT = "kvpolicy:"
# Names are parts of requests, so that they must not lead out of the folder.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
KINDS = ("keys", "values")


@attrs.frozen(kw_only=True)
class DocumentFacts:
    """The facts in a document's file besides keys and values, such as its policy and model.

    Of the ``read_len`` tokens of the document, every head of every layer holds ``length`` entries,
    of ``dtype``, such as ``"bfloat16"``. ``policy_text`` is the policy as code. ``chat`` says if
    the document is the beginning of the first user message of a chat. ``nonce`` is random, so that
    nobody can guess the digest.
    """

    length: int
    read_len: int
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    vocab_size: int
    policy: Description = attrs.field(eq=False)
    policy_text: str
    chat: bool
    nonce: str


@attrs.frozen(eq=False)
class ServedDocument:
    """A compressed document in a file, from which vLLM answers questions.

    A request for it begins with the document's placeholders. vLLM loads the document's entries in
    their place, and computes only what follows them.

    Args:
        path: The file.
        facts: What the file says.
        model: The fingerprint of the model that read the document.
        digests: ``[layers, 2, kv_heads, 32]`` uint8, the SHA-256 of each head's keys and values.
        digest: The SHA-256 of all of these.

    Attributes:
        placeholders: The ids that stand for the document in a prompt, one for each entry.
    """

    path: Path
    facts: DocumentFacts
    model: ModelFingerprint
    digests: Tensor
    digest: str
    placeholders: tuple[int, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        ids = placeholder_ids(self.digest, self.facts.length, self.facts.vocab_size)
        object.__setattr__(self, "placeholders", ids)

    def __repr__(self) -> str:
        return (
            f"ServedDocument({self.name!r}: {self.length:,} of {self.read_len:,} tokens under "
            f"{self.facts.policy_text})"
        )

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ServedDocument:
        """Load a document's facts from its file; keys and values are read later, when needed.

        Args:
            path: The file that `export` wrote; its name without ``.safetensors`` is the document's.

        Raises:
            DocumentError: The file cannot be read, was not written by `export`, or was changed.
        """
        with TensorFile(Path(path)) as file:
            return read_document(file)

    @property
    def name(self) -> str:
        """The document's name in requests: its file's name without the suffix."""
        return self.path.name.removesuffix(SUFFIX)

    @property
    def length(self) -> int:
        """The number of entries (keys with values) that every head of every layer holds."""
        return self.facts.length

    @property
    def read_len(self) -> int:
        """The number of tokens of the original document."""
        return self.facts.read_len

    @property
    def cache_salt(self) -> str:
        """The salt that identifies the document's blocks in vLLM's prefix cache.

        Only who can read the file knows it. A request without it is refused.
        """
        return f"{SALT}{self.digest}"

    @property
    def token_bytes(self) -> int:
        """The bytes that one entry takes in all layers together."""
        facts = self.facts
        size = getattr(torch, facts.dtype).itemsize
        return int(facts.layers * facts.kv_heads * (facts.head_dim + facts.value_dim) * size)

    @property
    def nbytes(self) -> int:
        """The bytes of all keys and values."""
        return self.length * self.token_bytes

    def prompt(self, question_ids: Sequence[int]) -> dict[str, Any]:
        """Return vLLM's prompt for a question: ``prompt_token_ids`` and ``cache_salt``.

        Offline the request must also name the document, in
        ``SamplingParams(extra_args={"kv_transfer_params": {"kvpolicy_document": name}})``.

        Args:
            question_ids: The ids that follow the document, at least one.

        Raises:
            TypeError: An id is not an int.
            ValueError: There is none, or one is outside the vocabulary.
        """
        ids = [*self.placeholders, *self._checked(question_ids)]
        return {"prompt_token_ids": ids, "cache_salt": self.cache_salt}

    def request(self, question_ids: Sequence[int]) -> dict[str, Any]:
        """Return the fields of an OpenAI completion that asks about the document; see `prompt`."""
        made = self.prompt(question_ids)
        return {"prompt": made["prompt_token_ids"], **self._named()}

    def chat_request(
        self, messages: Sequence[Mapping[str, Any]], question_ids: Sequence[int]
    ) -> dict[str, Any]:
        """Return the fields of an OpenAI chat completion that asks about the document.

        Args:
            messages: The messages, for the server's parsers; they are not tokenised there.
            question_ids: What the chat template makes of the messages after the document.
        """
        fields = self._named()
        fields["kv_transfer_params"]["prompt_token_ids"] = self.prompt(question_ids)[
            "prompt_token_ids"
        ]
        return {"messages": list(messages), **fields}

    def _named(self) -> dict[str, Any]:
        return {"cache_salt": self.cache_salt, "kv_transfer_params": {PARAMETER: self.name}}

    def _checked(self, question_ids: Sequence[int]) -> list[int]:
        ids = list(question_ids)
        if not ids:
            raise ValueError("question_ids must be at least one id, got none")
        for each in ids:
            if isinstance(each, bool) or not isinstance(each, int):
                raise TypeError(f"question_ids must be ints, got {each!r}")
            if not 0 <= each < self.facts.vocab_size:
                raise ValueError(
                    f"question_ids must be in [0, {self.facts.vocab_size - 1}], got {each}"
                )
        return ids

    def check(
        self, hf_config: Any, *, dtype: str | None = None, checkpoint: Path | None = None
    ) -> None:
        """Check that the document can be served from a model.

        Args:
            hf_config: The model's configuration, of Transformers.
            dtype: The precision in which the model is served, such as ``"bfloat16"``; None if
                unknown.
            checkpoint: The folder of the model's weights, some of which are compared; None compares
                the configurations only.

        Raises:
            DocumentError: Another model has read the document, or it is in another precision.
        """
        reason = misfit(self.model, hf_config, checkpoint)
        if reason is None and dtype is not None and dtype != self.facts.dtype:
            reason = (
                f"the document is in {self.facts.dtype}, the model is served in {dtype}; export "
                f"it from a model in {dtype}, or serve with --dtype {self.facts.dtype}"
            )
        if reason is not None:
            raise DocumentError(f"document {self.name!r} does not fit the served model: {reason}")

    def verify(self) -> None:
        """Read the whole file and compare it with its digests.

        Raises:
            DocumentError: The file was changed since it was written or loaded.
        """
        for index in range(self.facts.layers):
            self.entries([index])

    def entries(
        self, layers: Sequence[int], heads: slice = slice(None), *, pinned: bool = False
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Read the keys and values of some layers and heads, in the form that attention gets them.

        Args:
            layers: Indices of layers.
            heads: Which KV heads.
            pinned: Whether they are read into pinned memory.

        Returns:
            For each layer, keys and values ``[length, heads, head_dim]``.

        Raises:
            DocumentError: The file was changed, replaced, or is gone.
        """
        found = {}
        with TensorFile(self.path) as file:
            if read_document(file).digest != self.digest:
                raise DocumentError(f"document {self.name!r} was replaced by another one")
            for layer in layers:
                keys, values = (self._head_tensors(file, layer, kind, heads) for kind in (0, 1))
                found[layer] = _by_token(keys, pinned), _by_token(values, pinned)
        return found

    def _head_tensors(self, file: TensorFile, layer: int, kind: int, heads: slice) -> Tensor:
        tensor = file.read(f"layers.{layer}.{KINDS[kind]}", heads)
        dim = self.facts.value_dim if kind else self.facts.head_dim
        wanted = self.digests[layer, kind, heads]
        if (
            tensor.shape != (wanted.shape[0], self.length, dim)
            or tensor.dtype != getattr(torch, self.facts.dtype)
            or not torch.equal(head_digests(tensor), wanted)
        ):
            raise DocumentError(
                f"document {self.name!r} is damaged: the {KINDS[kind]} of layer {layer} are not "
                "those that were written; export it again"
            )
        return tensor


def _by_token(tensor: Tensor, pinned: bool) -> Tensor:
    heads, length, dim = tensor.shape
    found = torch.empty(length, heads, dim, dtype=tensor.dtype, pin_memory=pinned)
    return found.copy_(tensor.transpose(0, 1))


def placeholder_ids(digest: str, length: int, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids that stand for a document in a prompt, derived from its SHA-256 digest.

    They come from the second quarter of the vocabulary. Special tokens, which parsers look for in
    prompts, are at its ends.
    """
    first = vocab_size // 4
    count = max(vocab_size // 2 - first, 1)
    found: list[int] = []
    for block in range((length + 7) // 8):
        drawn = hashlib.sha256(f"{digest}:{block}".encode()).digest()
        found += [int.from_bytes(drawn[at : at + 4], "little") for at in range(0, 32, 4)]
    return tuple(first + each % count for each in found[:length])


def head_digests(tensor: Tensor) -> Tensor:
    """Return the SHA-256 of each head ``[heads, 32]`` uint8 of a tensor ``[heads, ...]``."""
    found = [hashlib.sha256(bytes_of(head.contiguous())).digest() for head in tensor]
    return torch.tensor([list(each) for each in found], dtype=torch.uint8).view(-1, 32)


def _digest(facts: str, model: str, samples: Tensor, digests: Tensor) -> str:
    found = hashlib.sha256()
    for each in (facts, model):
        found.update(f"{len(each)}:{each}".encode())
    for tensor in (samples, digests):
        found.update(bytes_of(tensor))
    return found.hexdigest()


def write_document(
    path: Path,
    facts: DocumentFacts,
    model: ModelFingerprint,
    entries: Sequence[tuple[Tensor, Tensor]],
) -> ServedDocument:
    """Write a document's file completely or not at all.

    ``entries`` are for each layer contiguous keys and values ``[kv_heads, length, head_dim]`` on
    the CPU.
    """
    text, (named, samples) = json.dumps(attrs.asdict(facts, recurse=False)), model.packed()
    pairs = [torch.stack([head_digests(each) for each in layer]) for layer in entries]
    digests = torch.stack(pairs)
    digest = _digest(text, named, samples, digests)
    tensors = {
        f"layers.{index}.{kind}": each
        for index, layer in enumerate(entries)
        for kind, each in zip(KINDS, layer, strict=True)
    }
    tensors |= {"digests": digests, "model.samples": samples}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "document": text,
        "model": named,
        "digest": digest,
    }
    write_whole(path, tensors, metadata)
    return ServedDocument(path, facts, model, digests, digest)


def read_document(file: TensorFile) -> ServedDocument:
    """Read a document's facts from its open file, or raise DocumentError if it is no document's."""
    name, metadata = file.path.name, file.metadata
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise DocumentError(
            f"{name} must be a file of kvpolicy.integrations.vllm.export, version {VERSION}, got "
            f"format {metadata.get('format')} {metadata.get('version', '')}"
        )
    samples, digests = file.read("model.samples"), file.read("digests")
    try:
        text, named = metadata["document"], metadata["model"]
        digest = _digest(text, named, samples, digests)
        if digest != metadata["digest"]:
            raise ValueError("its digest is another one")
        facts = DocumentFacts(**json.loads(text))
        model = ModelFingerprint.unpacked(named, samples)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DocumentError(f"{name} was changed after it was written: {error}") from None
    return ServedDocument(file.path, facts, model, digests, digest)
