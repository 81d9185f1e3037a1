"""Scores tokens by the last tokens' attention, minus their similarity to other keys."""

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from kvpolicy.attention import block_bytes, query_key_products
from kvpolicy.checks import check_count, check_kernel_size, check_rate
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer

# Number of keys that are compared with all others at a time.
RUN = 64


@attrs.frozen
class RedundancyScorer(Scorer):
    """Scores tokens by the last tokens' attention, minus their keys' similarity to others.

    ``saliency[h, j] = importance * I[h, j] - (1 - importance) * R[h, j]`` per KV head ``h``, in
    float32, for the tokens before the window. ``I`` is the softmax, over these tokens, of the
    largest product in the group, averaged over the window's queries, then max-pooled. ``R`` is the
    softmax over all tokens ``j`` of the mean over ``i`` of ``cos(k_i, k_j)``. The cosine counts as
    0 for ``i = j``, and for the last ``j`` whose cosine with ``i`` exceeds ``threshold``, so that
    the newest of many copies is not penalised. Keys are taken after rotary embedding.

    Args:
        window_size: Tokens of the observation window, at least 1.
        kernel_size: Width of the pooling, odd, at least 1 (1 does not pool).
        importance: Weight of the attention, in [0, 1].
        threshold: Cosine above which a key counts as a copy of another, in [0, 1].

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range.

    Example:
        >>> RedundancyScorer(window_size=16).unscored_tail
        16

    Source: R-KV (arXiv 2505.24133). In its code the first row's similarity serves for all rows of
    a batch, and the similarity of a key without copies to the first key is left out; here every row
    has its own similarity, and all similarities of a key without copies count.
    """

    paper = "arXiv 2505.24133"

    window_size: int = attrs.field(default=8, kw_only=True)
    kernel_size: int = attrs.field(default=7, kw_only=True)
    importance: float = attrs.field(default=0.1, kw_only=True)
    threshold: float = attrs.field(default=0.5, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("window_size", self.window_size, minimum=1)
        check_kernel_size(self.kernel_size)
        check_rate("importance", self.importance, zero=True)
        check_rate("threshold", self.threshold, zero=True)

    @property
    def num_queries(self) -> int:
        """The number of last queries whose attention the scorer reads."""
        return self.window_size

    @property
    def unscored_tail(self) -> int:
        """The number of last tokens that get no saliency and are always kept."""
        return self.window_size

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        before = max(context.key_len - self.window_size, 0)
        saliency = torch.zeros(context.positions.shape, device=context.keys.device)
        if before:
            copies = self._redundancy(context)[..., :before]
            attention = self._importance(context, before)
            saliency[..., :before] = self.importance * attention - (1 - self.importance) * copies
        return saliency

    def _importance(self, context: LayerContext, before: int) -> Tensor:
        """Return the last tokens' attention to earlier ones, ``[batch, kv_heads, before]``."""
        products = query_key_products(context.queries, context.keys[:, :, :before])
        grouped = products.view(context.batch, context.kv_heads, -1, *products.shape[2:])
        highest = grouped.amax(dim=2) * context.attention.scaling
        weights = _softmax(highest, context.valid[:, :, None, :before])
        real = context.query_valid[:, None, :, None]
        mean = (weights * real).sum(dim=2) / real.sum(dim=2).clamp(min=1)
        return functional.max_pool1d(
            mean, self.kernel_size, stride=1, padding=self.kernel_size // 2
        )

    def _redundancy(self, context: LayerContext) -> Tensor:
        """Return each key's mean similarity to the other keys, ``[batch, kv_heads, key_len]``."""
        valid = context.valid
        keys = context.keys.detach().float()  # detached, so that memory can be reused
        directions = functional.normalize(keys, dim=-1) * valid[..., None]
        # The sum of a key's cosines with all others is its product with the sum of them.
        total = directions.sum(dim=2, keepdim=True)
        sums = (directions * (total - directions)).sum(dim=-1)
        self._leave_out_copies(sums.flatten(0, 1), directions.flatten(0, 1))
        return _softmax(sums / valid.sum(dim=-1, keepdim=True).clamp(min=1), valid)

    def _leave_out_copies(self, sums: Tensor, directions: Tensor) -> None:
        """Keep the last of several similar keys from counting as redundant: subtract its cosines.

        Computed in blocks of heads and keys, so that the whole matrix is never in memory. All
        blocks use the same memory, since allocating it costs more than the products.
        """
        heads, length = sums.shape
        # Keys of zeros, which resemble none, fill the last run.
        others = functional.pad(directions, (0, 0, 0, -length % RUN)).transpose(-1, -2)
        whole = others.shape[-1]
        limit = block_bytes(directions.device) // 4  # bytes of float32
        width = min(max(limit // (RUN * whole), 1), heads)
        count = min(max(limit // (width * whole), 1), length)
        memory = directions.new_empty(width, count, whole)
        for head in range(0, heads, width):
            own = slice(head, head + width)
            for start in range(0, length, count):
                block = directions[own, start : start + count]
                cosines = memory[: block.shape[0], : block.shape[1]]
                torch.matmul(block, others[own], out=cosines)
                cosines.diagonal(start, -2, -1).zero_()
                last, copied = self._last_copies(cosines)
                sums[own].scatter_add_(-1, last, -copied)

    def _last_copies(self, cosines: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of the last key similar to each key, and their cosine; 0 and 0 if none.

        Searches runs of keys by their highest cosine, then one run key by key. The last axis of
        ``cosines``, the keys, has a multiple of `RUN`.
        """
        runs = cosines.view(*cosines.shape[:-1], -1, RUN)
        # The maximum of places counted from 1, in float32, which is exact up to 2**24.
        places = torch.arange(1.0, runs.shape[2] + 1, device=cosines.device)
        found = ((runs.amax(dim=-1) > self.threshold) * places).amax(dim=-1)
        run = (found.long() - 1).clamp(min=0)
        index = run[..., None, None].expand(*run.shape, 1, RUN)
        members = runs.gather(2, index)[..., 0, :]
        places = torch.arange(1.0, RUN + 1, device=cosines.device)
        place = ((members > self.threshold) * places).amax(dim=-1)
        member = (place.long() - 1).clamp(min=0)
        copied = members.gather(-1, member[..., None])[..., 0]
        last = run * RUN + member
        return last.masked_fill(found == 0, 0), copied.masked_fill(found == 0, 0.0)


def _softmax(scores: Tensor, valid: Tensor) -> Tensor:
    """Compute the softmax over valid entries of the last axis; invalid ones get 0."""
    lowest = torch.finfo(scores.dtype).min  # finite even if nothing is valid
    return scores.masked_fill(~valid, lowest).softmax(dim=-1) * valid
