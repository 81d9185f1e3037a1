"""A stand-in for the packages of flash attention, which computes with plain attention on a CPU.

Transformers imports its kernels from `flash_attn` (FlashAttention 2), `flash_attn_interface` (3) or
`flash_attn.cute` (4). `installed` puts modules with these names in their place, so that all code
around the kernels runs as on a GPU: the masks of Transformers, its unpadding, its choice of a
kernel, and everything of this library. The functions refuse what the kernels refuse, except for
float32, so that results can be compared tightly. Rounding, speed and memory are not the kernels'.
"""

import copy
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as transformers_side

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CALLS: Counter[str] = Counter()  # of "dense" and "varlen", so that a test sees what ran


@attrs.frozen
class How:
    """The settings of a call."""

    scale: float | None  # factor on the products; None for the usual one
    causal: bool  # whether a query sees no key behind its own place
    # How many keys before and behind its own place it sees; None or -1 for all.
    window: tuple[int | None, int | None]
    softcap: float = 0.0  # bound of the scores; 0 for none
    # `[query_heads]`, scores that take a share of the weights and give no value.
    sink: Tensor | None = None
    # Of what the head dimension must be a multiple; FlashAttention 2 pads by itself.
    multiple: int = 1

    def check(self, q: Tensor, k: Tensor, v: Tensor, axes: int) -> None:
        """Refuses tensors other than `[..., heads, head_dim]` with queries in groups."""
        if not q.dim() == k.dim() == v.dim() == axes:
            raise RuntimeError(f"q, k and v must have {axes} axes, got {q.dim()}, {k.dim()}")
        if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
            raise RuntimeError(f"q, k and v must be fp16 or bf16, got {q.dtype}, {k.dtype}")
        if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
            raise RuntimeError(f"shapes do not fit: {q.shape}, {k.shape}, {v.shape}")
        if q.shape[-1] > 256 or q.shape[-1] % self.multiple:
            raise RuntimeError(f"head_dim must be a multiple of {self.multiple}, 256 at most")
        if q.shape[-2] % k.shape[-2]:
            raise RuntimeError("heads of keys and values must divide the heads of queries")
        if self.sink is not None and self.sink.shape != q.shape[-2:-1]:
            raise RuntimeError(f"there must be a sink for each head, got {self.sink.shape}")

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends in one sequence, whose last query is at the place of the last key.

        Args:
            q: `[query_len, query_heads, head_dim]`.
            k: `[key_len, kv_heads, head_dim]`.
            v: as `k`.

        Returns:
            `[query_len, query_heads, head_dim]`; 0 for a query that sees no key.
        """
        query_len, key_len = len(q), len(k)
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        apart = torch.arange(key_len) - torch.arange(query_len)[:, None] - (key_len - query_len)
        before, behind = (key_len if each in (None, -1) else each for each in self.window)
        assert before is not None
        assert behind is not None
        seen = (apart >= -before) & (apart <= (0 if self.causal else behind))
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sink is not None:
            sink = self.sink.float()[:, None, None].expand(-1, query_len, 1)
            scores = torch.cat([scores, sink], dim=2)
        weights = scores.softmax(dim=2)[..., :key_len]
        weights = torch.where(seen.any(dim=1)[:, None], weights, 0.0)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends in every row of `[batch, len, heads, head_dim]`."""
        CALLS["dense"] += 1
        self.check(q, k, v, axes=4)
        if len(q) != len(k):
            raise RuntimeError(f"q and k must have as many rows, got {len(q)} and {len(k)}")
        return torch.stack([self.attend(*row) for row in zip(q, k, v, strict=True)])

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, ends: tuple[Tensor, Tensor], most: tuple[Any, Any]
    ) -> Tensor:
        """Attends in every sequence of `[total, heads, head_dim]`.

        Args:
            q: queries of all sequences.
            k: keys of all sequences.
            v: as `k`.
            ends: where the sequences of `q` and `k` end, `[sequences + 1]` each.
            most: length of the longest sequence of `q` and of `k`.
        """
        CALLS["varlen"] += 1
        self.check(q, k, v, axes=3)
        queries, keys = spans(ends[0], len(q), most[0]), spans(ends[1], len(k), most[1])
        output = torch.empty_like(q)
        for own, seen in zip(queries, keys, strict=True):
            output[own] = self.attend(q[own], k[seen], v[seen])
        return output


def spans(ends: Tensor, total: int, most: Any) -> list[slice]:
    """The sequences between given ends; wrong ends would make a kernel read other memory."""
    if ends.dtype != torch.int32 or ends.dim() != 1 or not ends.is_contiguous():
        raise RuntimeError(f"cu_seqlens must be contiguous int32 [sequences + 1], got {ends}")
    places = ends.tolist()
    found = [slice(start, end) for start, end in pairwise(places)]
    lengths = [each.stop - each.start for each in found]
    if places[0] != 0 or places[-1] != total or min(lengths) < 0 or max(lengths) > int(most):
        raise RuntimeError(f"cu_seqlens must ascend from 0 to {total} by {most}, got {places}")
    return found


# By version, the settings that Transformers looks for among the names of a function's arguments.
SETTINGS = {
    2: ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "deterministic"),
    3: ("softmax_scale", "causal", "window_size", "softcap", "deterministic"),
    4: ("softmax_scale", "causal", "window_size", "learnable_sink", "softcap", "deterministic"),
}
LIMITS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def kernel(version: int, *, varlen: bool = False) -> Any:
    """A function with the arguments of a version of the package."""
    names = ("q", "k", "v", *(LIMITS if varlen else ()), *SETTINGS[version])
    parameters = [
        inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in names
    ]
    signature = inspect.Signature(parameters)

    def attend(*args: Any, **named: Any) -> Any:
        given = signature.bind_partial(*args, **named).arguments
        assert not given.get("dropout_p")
        how = How(
            given.get("softmax_scale"),
            given.get("causal", False),
            given.get("window_size", (None, None)),
            given.get("softcap", 0.0),
            given.get("learnable_sink"),
            multiple=1 if version == 2 else 8,
        )
        tensors = given["q"], given["k"], given["v"]
        if varlen:
            ends_q, ends_k, most_q, most_k = (given[each] for each in LIMITS)
            found = how.varlen(*tensors, (ends_q, ends_k), (most_q, most_k))
        else:
            found = how.dense(*tensors)
        return (found, None) if version == 4 else found

    attend.__signature__ = signature  # type: ignore[attr-defined]
    return attend


def unpad_input(hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Takes the tokens of `[batch, len, ...]` that a mask `[batch, len]` shows."""
    if mask.dim() != 2:
        raise RuntimeError(f"attention_mask must be [batch, len], got {list(mask.shape)}")
    lengths = mask.sum(dim=1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    ends = pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return hidden.flatten(0, 1)[indices], indices, ends, int(lengths.max()), lengths


def pad_input(hidden: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts tokens back to where `unpad_input` has taken them from."""
    output = hidden.new_zeros(batch * seqlen, *hidden.shape[1:])
    output[indices] = hidden
    return output.unflatten(0, (batch, seqlen))


def functions(version: int) -> dict[str, Any]:
    return {
        "flash_attn_func": kernel(version),
        "flash_attn_varlen_func": kernel(version, varlen=True),
    }


PACKAGES: dict[str, dict[str, Any]] = {
    "flash_attn": {**functions(2), "flash_attn_with_kvcache": None},
    "flash_attn.bert_padding": {"pad_input": pad_input, "unpad_input": unpad_input},
    "flash_attn_interface": {**functions(3), "flash_attn_with_kvcache": None},
    "flash_attn.cute": functions(4),
}


@contextmanager
def installed() -> Iterator[None]:
    """Lets Transformers find the stand-in as if all three packages were installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, given in PACKAGES.items():
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            vars(module).update(given)
            patch.setitem(sys.modules, name, module)
        for version in (2, 3, 4):
            check = f"is_flash_attn_{version}_available"
            patch.setattr(transformers_side, check, lambda **options: True)
        # What Transformers has loaded, it keeps; put back when the stand-in goes.
        for name in [each for each in vars(transformers_side) if each.endswith("_fn")]:
            patch.setattr(transformers_side, name, None)
        patch.setattr(transformers_side, "_loaded_implementation", None)
        CALLS.clear()
        yield


def under_flash(model: PreTrainedModel, name: str = "flash_attention_2") -> PreTrainedModel:
    """A copy of a model that attends by flash attention; loading one so asks for a GPU."""
    model = copy.deepcopy(model)
    model.config._attn_implementation = name
    return model
