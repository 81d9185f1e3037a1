"""Export one row of a `PolicyCache` to a file that vLLM can serve.

vLLM counts a request's position, its slot and its length with one number. So after a document of
``m`` entries the next token is at the rotary position ``m``, while in the cache it is at ``r``, the
number of tokens read (less those that a restart left out). Rotary attention depends only on
differences of positions: every key is rotated by the same ``m - r``, and attention is what it was,
gaps included.
"""

import os
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicy.checks import check_count, check_kind
from kvpolicy.description import describe
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.document import read
from kvpolicy.integrations.transformers.model.kinds import FullAttention
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.model.rotary import (
    RotaryChannels,
    changes_with_length,
    has_axes,
)
from kvpolicy.integrations.transformers.state.fingerprint import ModelFingerprint
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.storage import QuantizedStorage
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.integrations.vllm.document import (
    NAME,
    SUFFIX,
    DocumentFacts,
    ServedDocument,
    write_document,
)
from kvpolicy.policies import StreamingLLM

DTYPES = ("float32", "float16", "bfloat16")
PROBED = 16  # tokens of the prompt that shows how layers rotate their keys


@torch.no_grad()
def export(
    cache: PolicyCache,
    model: Any,
    path: str | os.PathLike[str],
    *,
    row: int | None = None,
    chat: bool = False,
) -> ServedDocument:
    """Write one row of a cache to a file from which vLLM serves it.

    The cache may have been filled in one turn or several, with or without gaps between the
    positions of kept tokens. It is not changed.

    Args:
        cache: A cache that has read a document. All heads of all layers must hold equal numbers of
            tokens.
        model: The model that filled it.
        path: The file, NAME.safetensors. An existing file is replaced at once when the new one is
            complete.
        row: Which row of the batch; None if there is only one, without padding.
        chat: Whether the cache has read the beginning of a user's message, as with
            ``ReadDocument(..., chat=True)``.

    Returns:
        The document.

    Raises:
        TypeError: An argument has the wrong type.
        OSError: The file cannot be written.
        UnsupportedModelError: vLLM cannot serve such a cache of this model: a layer has a window, a
            latent, a state or no keys of its own, rotary positions have several axes or change with
            the length, or the model is spread over processes.
        ValueError: The cache has read nothing or only a part of a prompt, holds quantised keys, or
            holds unequal numbers of tokens; or ``row`` or ``path`` is wrong.

    Example:
        >>> import tempfile, torch
        >>> from kvpolicy.evaluation import load  # the model SmolLM2-135M-Instruct
        >>> from kvpolicy.policies import SnapKV
        >>> model, cache = load().model, PolicyCache(SnapKV(retention_rate=0.25))
        >>> with torch.no_grad(), cache.attached(model):
        ...     _ = model(torch.arange(3, 67)[None], cache=cache)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     document = export(cache, model, f"{folder}/report.safetensors")
        >>> document.name, document.length, document.read_len
        ('report', 16, 64)
    """
    check_kind("cache", cache, PolicyCache)
    check_kind("chat", chat, bool)
    target = check_target(path)
    parts = ModelParts(model)
    _check_model(parts)
    with cache.attached(model):
        tokens = _read_by(cache)
        row = _row(tokens, row)
        turns = _turns(model, parts)
        held = [_entries(layer, row) for layer in cache.layers]
        length = _length(cache, held)
        read_len = int(tokens.lengths[row])
        skipped = 0 if tokens.skipped is None else int(tokens.skipped[row])
        by = length - (read_len - skipped)
        entries = []
        for (of_heads, values_of_heads), how in zip(held, turns, strict=True):
            stacked = torch.stack(of_heads)[None]
            turned = how.moved(stacked, torch.full(stacked.shape[:-1], by))[0]
            own_values = torch.stack(values_of_heads)
            entries.append((turned.cpu().contiguous(), own_values.cpu().contiguous()))
    keys, values = entries[0]
    facts = DocumentFacts(
        length=length,
        read_len=read_len,
        layers=len(entries),
        kv_heads=keys.shape[0],
        head_dim=keys.shape[2],
        value_dim=values.shape[2],
        dtype=_dtype(keys),
        vocab_size=parts.config.vocab_size,
        policy=describe(cache.policy),
        policy_text=str(cache.policy),
        chat=chat,
        nonce=secrets.token_hex(16),
    )
    return write_document(target, facts, ModelFingerprint.of(parts.decoder), entries)


def check_target(path: str | os.PathLike[str]) -> Path:
    """Return the path after a check that a document can be written there."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or os.PathLike, got {path!r}")
    target = Path(path)
    if target.suffix != SUFFIX or not NAME.fullmatch(target.stem):
        raise ValueError(
            f"path must be NAME{SUFFIX} with a name of letters, digits, '_', '-' and '.', by which "
            f"requests name the document, got {os.fspath(path)!r}"
        )
    if not target.parent.is_dir():
        raise ValueError(f"path must be in a folder that exists, got {os.fspath(path)!r}")
    return target


def _check_model(parts: ModelParts) -> None:
    """Check that vLLM can store what the model's layers hold: one entry per token and head."""
    for index, kind in enumerate(parts.kinds):
        if not isinstance(kind, FullAttention):
            raise _unsupported(parts, f"its layer {index} is of the kind {kind.name}")
        if parts.temperatures[index] is not None:
            raise _unsupported(parts, f"its layer {index} scales queries by their positions")
    if has_axes(parts.config):
        raise _unsupported(parts, "its rotary positions have several axes")
    if changes_with_length(parts.config):
        raise _unsupported(
            parts, "its rotary frequencies change with the length (dynamic or LongRoPE)"
        )


def _unsupported(parts: ModelParts, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "model must have full attention with a fixed rotary embedding in every layer, so that "
        f"vLLM can serve its documents, but {type(parts.model).__name__} does not: {reason}; "
        "send shorter prompts instead (docs/examples/shorter_prompt.py)"
    )


def _read_by(cache: PolicyCache) -> SeenTokens:
    """Return the tokens that a cache has read, after a check that it can be exported."""
    tokens = cache._reader.tokens
    if tokens is None or cache._reader.now.chunks is not None:
        raise ValueError("cache must have read a whole prompt to be exported, got one that has not")
    if isinstance(cache.storage, QuantizedStorage):
        raise ValueError(
            "storage of the cache must hold keys exactly to be exported, got "
            f"{cache.storage}; read the document into a PolicyCache without it"
        )
    return tokens


def _row(tokens: SeenTokens, row: int | None) -> int:
    if row is None and (tokens.batch > 1 or tokens.padded):
        raise ValueError(
            f"row must be given for a cache of {tokens.batch} rows"
            f"{' with padding' if tokens.padded else ''}, from 0 to {tokens.batch - 1}, got None"
        )
    return check_count("row", 0 if row is None else row, maximum=tokens.batch - 1)


def _turns(model: Any, parts: ModelParts) -> list[RotaryChannels]:
    """Find how each layer rotates its keys, by running it on a few tokens."""
    probe = PolicyCache(StreamingLLM(retention_tokens=PROBED // 2, gapless=True))
    device = parts.device_of(0)
    ids = torch.arange(PROBED, device=device)[None] % parts.config.vocab_size
    try:
        read(model, probe, ids, torch.ones_like(ids))
    except UnsupportedModelError as error:
        raise _unsupported(parts, str(error)) from error
    found = [layer.facts.turns for layer in probe.layers]
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def _entries(layer: PolicyLayer, row: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the keys and the values of each head of a row, without padding."""
    if layer.facts.spread.shares > 1:
        raise UnsupportedModelError(
            "model must run in one process to export its caches, got one that is spread over "
            f"{layer.facts.spread.shares}; read the document with the model in one process"
        )
    keys, values, positions = layer.keys, layer.values, layer.positions
    assert keys is not None
    assert values is not None
    assert positions is not None
    heads = keys.shape[1]
    valid = (positions[row] >= 0).expand(heads, -1)
    return (
        [keys[row, head, valid[head].to(keys.device)] for head in range(heads)],
        [values[row, head, valid[head].to(values.device)] for head in range(heads)],
    )


def _length(cache: PolicyCache, held: list[tuple[list[Tensor], list[Tensor]]]) -> int:
    """Return the number of entries that all heads of all layers hold; they must be equal."""
    counts = {len(head) for keys, _ in held for head in keys}
    if len(counts) > 1:
        raise ValueError(
            "cache must hold equally many tokens in every head of every layer, since vLLM has "
            f"one length for a request, got {min(counts)} to {max(counts)} under {cache.policy}; "
            "policies that fit: SnapKV, FastKV with retention_rate <= tsp_rate, KeyDiff, "
            "KeyNorm, StreamingLLM, TOVA, H2O"
        )
    (length,) = counts
    return length


def _dtype(keys: Tensor) -> str:
    name = str(keys.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype of the cache must be one of {', '.join(DTYPES)}, got {name}")
    return name
