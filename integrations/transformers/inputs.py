"""Reading a forward's inputs: which of its tokens are real, checked before anything is computed."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.tokens import SeenTokens


@attrs.frozen(eq=False)
class Incoming:
    """The tokens of one forward.

    Args:
        arguments: The decoder's arguments, with each row's padding moved before its tokens.
        tokens: The tokens seen before, as far as they still count.
        moved: See `SeenTokens.with_padding`; None where nothing moved.
        new_valid: ``[batch, new_len]`` bool, False on padding, which comes first.
        columns: ``[batch, new_len]`` bool, the same in the order of the input's columns.
        padded: Whether any is padding.
    """

    arguments: dict[str, Any]
    tokens: SeenTokens
    moved: Tensor | None
    new_valid: Tensor
    columns: Tensor
    padded: bool


def read_inputs(arguments: dict[str, Any], seen: SeenTokens | None, *, acts: bool) -> Incoming:
    """Read the arguments of a decoder's forward.

    Args:
        arguments: By name, as the decoder takes them.
        seen: The tokens the cache has seen; None if none.
        acts: Whether the policy acts on this forward.

    Raises:
        TypeError: There is neither ``input_ids`` nor ``inputs_embeds``.
        ValueError: The batch size or the attention mask does not fit what was seen, or a row is
            padded on the right.
    """
    inputs = arguments.get("input_ids")
    if inputs is None:
        inputs = arguments.get("inputs_embeds")
    if inputs is None:
        raise TypeError("input_ids or inputs_embeds must be given, got neither")
    batch, new_len = inputs.shape[:2]
    if seen is None:
        seen = SeenTokens.none(batch, inputs.device)
    if batch != seen.batch:
        raise ValueError(
            f"input_ids must have the batch size the cache holds, {seen.batch}, got {batch}; "
            "use a new PolicyCache or reset() this one"
        )
    mask = arguments.get("attention_mask")
    if mask is None:
        return _without_mask(arguments, seen, new_len)
    _check_shape(mask, batch, seen.seen, new_len)
    mask = mask.to(device=inputs.device, dtype=torch.bool)
    tokens, moved = _read_past(mask[:, : seen.seen], seen, acts=acts)
    columns = mask[:, seen.seen :]
    if bool(columns.all()):
        return Incoming(arguments, tokens, moved, columns, columns, padded=False)
    if new_len > 1 and not bool(columns[:, -1].all()):
        row = int((~columns[:, -1]).nonzero()[0])
        raise ValueError(
            f"attention_mask must pad on the left: the last token of every row must be real, but "
            f"row {row} ends in padding; set tokenizer.padding_side = 'left'"
        )
    arguments, new_valid = _padding_first(arguments, columns, seen.seen)
    return Incoming(arguments, tokens, moved, new_valid, columns, padded=True)


def _without_mask(arguments: dict[str, Any], seen: SeenTokens, new_len: int) -> Incoming:
    if seen.padded:
        raise ValueError(
            "attention_mask must be 0 on the padding that the cache has read, got None (or all "
            f"ones, for which generate gives None); pass the mask of all {seen.seen} tokens seen "
            f"and the {new_len} new ones"
        )
    valid = torch.ones(seen.batch, new_len, dtype=torch.bool, device=seen.valid.device)
    return Incoming(arguments, seen, None, valid, valid, padded=False)


def _check_shape(mask: Any, batch: int, seen: int, new_len: int) -> None:
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be 2D, [batch, tokens seen and new], got {shape}; the policy "
            "makes each layer's own mask from it"
        )
    if mask.shape != (batch, seen + new_len):
        raise ValueError(
            f"attention_mask must be [batch, tokens seen + new] = [{batch}, {seen} + {new_len}], "
            f"got {list(mask.shape)}"
        )


def _read_past(past: Tensor, seen: SeenTokens, *, acts: bool) -> tuple[SeenTokens, Tensor | None]:
    if torch.equal(past, seen.valid):
        return seen, None
    if bool((past & ~seen.valid).any()):
        raise ValueError(
            "attention_mask must be 0 wherever it was when the tokens were read, but it turns "
            "padding into tokens; reset() the cache and start again"
        )
    if not acts:
        raise ValueError(
            "attention_mask must not change for tokens already read, except where a new turn "
            "starts: call cache.start_turn() first"
        )
    return seen.with_padding(past)


def _padding_first(
    arguments: dict[str, Any], columns: Tensor, seen: int
) -> tuple[dict[str, Any], Tensor]:
    """Move padding that stands between a row's tokens, as a later turn's may, before them."""
    if not bool((columns[:, :-1] & ~columns[:, 1:]).any()):
        return arguments, columns
    batch, new_len = columns.shape
    order = columns.to(torch.uint8).argsort(dim=1, stable=True)
    moved = dict(arguments)
    if moved.get("position_ids") is None:
        moved["position_ids"] = torch.arange(seen, seen + new_len, device=columns.device)[None]
    for name in {"input_ids", "inputs_embeds", "position_ids"} & moved.keys():
        if moved[name] is not None:
            value = moved[name].expand(batch, *moved[name].shape[1:])
            index = order.view(batch, new_len, *[1] * (value.ndim - 2)).expand(value.shape)
            moved[name] = value.gather(1, index)
    new_valid = columns.gather(1, order)
    past = moved["attention_mask"][:, :seen]
    moved["attention_mask"] = torch.cat([past, new_valid.to(past.dtype).to(past.device)], dim=1)
    return moved, new_valid
