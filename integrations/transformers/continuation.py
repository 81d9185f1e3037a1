"""Read the inputs of a `generate` call, and check that they continue the tokens of a cache."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.inputs import no_tokens, other_batch, read_past
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.frozen(eq=False)
class Given:
    """The token ids, embeddings and attention mask that a call of `generate` gets.

    Args:
        ids: ``[rows, len]`` token ids; None if the call has none.
        embeds: ``[rows, len, hidden]`` embeddings that are read in place of ids; None if the call
            has none.
        mask: The attention mask, if any.
    """

    ids: Tensor | None
    embeds: Tensor | None
    mask: Any

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Find and check the ids, embeddings and mask among a `generate` call's arguments."""
        name = "input_ids" if "input_ids" in kwargs else "inputs"
        ids = kwargs.get(name, args[0] if args else None)
        embeds = kwargs.get("inputs_embeds")
        mask = kwargs.get("attention_mask")
        _check_tensors({name: ids, "inputs_embeds": embeds, "attention_mask": mask})
        return Given(
            ids if isinstance(ids, Tensor) and ids.ndim >= 2 else None,
            embeds if isinstance(embeds, Tensor) and embeds.ndim >= 2 else None,
            mask,
        )

    @property
    def ids_len(self) -> int:
        """The number of columns of the given ids, with which the output of `generate` begins."""
        return 0 if self.ids is None else self.ids.shape[1]

    @property
    def context_len(self) -> int | None:
        """The number of columns of the whole conversation; None if it is unknown."""
        read = self.ids if self.embeds is None else self.embeds
        if read is None:
            return None
        covered = self.mask.shape[1] if self._flat_mask is not None and self.embeds is None else 0
        return max(read.shape[1], covered)

    @property
    def _flat_mask(self) -> Tensor | None:
        """The given padding mask ``[rows, columns]``; None if the call has no such mask."""
        return self.mask if isinstance(self.mask, Tensor) and self.mask.ndim == 2 else None

    def check_continues(self, seen: SeenTokens | None) -> None:
        """Check that the inputs contain new tokens after those that the cache has read."""
        read = self.ids if self.embeds is None else self.embeds
        length = self.context_len
        if seen is None or read is None or length is None:
            return
        name = "input_ids" if self.embeds is None else "inputs_embeds"
        if not len(read):
            raise no_tokens(name, read)
        if seen.batch % len(read):  # `generate` repeats every row once for each beam or answer
            raise other_batch(name, seen.batch, len(read))
        mask = self.mask
        new_alone = isinstance(mask, Tensor) and mask.shape[1:2] != read.shape[1:2]
        if length <= seen.seen or (self.embeds is not None and new_alone):
            raise ValueError(
                f"{name} must continue the {seen.seen} tokens the cache has seen, got "
                f"{read.shape[1]}; pass the whole conversation, or (as input_ids) the new tokens "
                "with an attention_mask over the whole conversation, or reset() the cache"
            )

    def check_same(self, seen: SeenTokens | None) -> None:
        """Check that a whole conversation begins with the ids that the cache has read."""
        ids, mask = self.ids, self._flat_mask
        if seen is None or ids is None or self.embeds is not None or ids.ndim != 2:
            return
        # `generate` repeats every row once for each beam or answer.
        each, rest = divmod(seen.batch, len(ids))
        if rest or ids.shape[1] != self.context_len:
            return  # another batch size, which is refused when it is read, or only new tokens
        if mask is not None and mask.shape == ids.shape:
            past = mask.repeat_interleave(each, dim=0)[:, : seen.seen]
            seen = read_past(past.to(seen.valid.device, torch.bool), seen, starts=True)[0]
        unlike = seen.first_unlike(ids.repeat_interleave(each, dim=0).to(seen.valid.device))
        if unlike is None:
            return
        row, column = unlike
        raise ValueError(
            f"input_ids must begin with the tokens that the cache has read, but in row {row} the "
            f"token at position {int(seen.valid[row, :column].sum())} was "
            f"{int(seen.ids[row, column])}, got {int(ids[row // each, column])}; pass the ids of "
            "earlier turns unchanged, since tokenizing their text again may give other ids, or "
            "reset() the cache to read another text"
        )


def _check_tensors(given: dict[str, Any]) -> None:
    """Check the type and shape of each named input; None stands for one not given."""
    rows = None
    for name, value in given.items():
        if value is None or (name == "attention_mask" and isinstance(value, dict)):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} must be a tensor, got {type(value).__name__}; let the tokenizer make it, "
                "with return_tensors='pt'"
            )
        if value.ndim < 2:
            raise ValueError(f"{name} must be [batch, len], got {list(value.shape)}")
        if rows is not None and len(value) != rows:
            raise ValueError(f"{name} must have the {rows} rows of the input, got {len(value)}")
        rows = len(value)
