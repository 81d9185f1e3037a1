"""Read and check a forward's inputs before anything is computed: which tokens are real.

In a later turn, rows may have padding between tokens. If the policy acts, columns are moved so that
each row's padding comes before its tokens, whose order stays. `in_input_order` puts the decoder's
output back into the order of the input.
"""

from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.state.tokens import SeenTokens

# Arguments of a decoder that have an entry for each token, [batch, new_len, ...]. The last one is
# for all layers, and is made from ids.
OF_TOKENS = ("input_ids", "inputs_embeds", "per_layer_inputs")


@attrs.frozen(eq=False)
class Incoming:
    """The tokens of one forward, read from its arguments and checked.

    Args:
        arguments: The decoder's arguments. If the policy acts, each row's padding is moved before
            its tokens.
        tokens: The tokens seen before, without those that have become padding.
        moved: See `SeenTokens.with_padding`; None if nothing moved.
        new_valid: ``[batch, new_len]`` bool, False on padding.
        columns: ``[batch, new_len]`` bool, the same in the order of the input's columns.
        order: ``[batch, new_len]`` int64, the input column that comes to each place; None if the
            columns keep their places.
        positions: ``[batch, new_len]`` int64, -1 on padding; None if they follow the tokens seen.
        skipped: See `SeenTokens.extended`.
        ids: ``[batch, new_len]``, in the order of the input's columns; None if unknown.
        kinds: ``[batch, new_len]`` int8, the `TokenKind` of each column; None if all are text.
    """

    arguments: dict[str, Any]
    tokens: SeenTokens
    moved: Tensor | None
    new_valid: Tensor
    columns: Tensor
    padded: bool
    order: Tensor | None = None
    positions: Tensor | None = None
    skipped: Tensor | None = None
    ids: Tensor | None = None
    kinds: Tensor | None = None


def read_inputs(
    arguments: dict[str, Any], seen: SeenTokens | None, *, acts: bool, starts: bool, ends: bool
) -> Incoming:
    """Read and check the inputs, mask and positions of a decoder's forward.

    The policy acts on it if ``acts``, and a turn begins if ``starts``. A row may have only padding
    unless the prompt ``ends``.
    """
    inputs = inputs_of(arguments)
    batch, new_len = inputs.shape[:2]
    if not (batch and new_len):
        raise no_tokens("input_ids", inputs)
    _check_positions(arguments.get("position_ids"), batch, new_len)
    if seen is None:
        seen = SeenTokens.none(batch, inputs.device)
    if batch != seen.batch:
        raise other_batch("input_ids", seen.batch, batch)
    seen = seen.to(inputs.device)
    if seen.skipped is not None and arguments.get("position_ids") is not None:
        behind = arguments["position_ids"] - seen.skipped[:, None]
        arguments = {**arguments, "position_ids": behind.clamp(min=0)}
    mask = arguments.get("attention_mask")
    if mask is None:
        return _without_mask(arguments, seen, new_len)
    _check_shape(mask, batch, seen.seen, new_len)
    mask = mask.to(device=inputs.device, dtype=torch.bool)
    tokens, moved = read_past(mask[:, : seen.seen], seen, starts=starts)
    columns = mask[:, seen.seen :]
    if bool(columns.all()):
        arguments = _with_positions(arguments, tokens, columns)
        return Incoming(arguments, tokens, moved, columns, columns, padded=False)
    if ends and new_len > 1 and not bool(columns[:, -1].all()):
        row = int((~columns[:, -1]).nonzero()[0])
        raise ValueError(
            f"attention_mask must pad on the left: the last token of every row must be real, but "
            f"row {row} ends in padding; set tokenizer.padding_side = 'left'"
        )
    moves = acts and bool((columns[:, :-1] & ~columns[:, 1:]).any())  # padding before all tokens
    order = columns.to(torch.uint8).argsort(dim=1, stable=True) if moves else None
    new_valid = columns if order is None else columns.gather(1, order)
    arguments = _with_positions(arguments, tokens, columns, padded=True)
    if order is not None:
        arguments = _reordered(arguments, order, seen.seen)
    return Incoming(arguments, tokens, moved, new_valid, columns, padded=True, order=order)


def inputs_of(arguments: dict[str, Any]) -> Tensor:
    """Return the forward's ids ``[batch, new_len]`` or embeddings ``[batch, new_len, hidden]``."""
    for name, axes in (("input_ids", "[batch, len]"), ("inputs_embeds", "[batch, len, hidden]")):
        found = arguments.get(name)
        if found is None:
            continue
        ids = name == "input_ids"
        wanted = "an int64 or int32" if ids else "a float"
        if not isinstance(found, Tensor):
            raise TypeError(f"{name} must be {wanted} tensor {axes}, got {type(found).__name__}")
        if not (found.dtype in (torch.int32, torch.int64) if ids else found.is_floating_point()):
            raise TypeError(f"{name} must be {wanted} tensor {axes}, got {found.dtype}")
        if found.ndim < axes.count(",") + 1:
            raise ValueError(f"{name} must be {axes}, got {list(found.shape)}")
        return found
    raise TypeError("input_ids or inputs_embeds must be given, got neither")


def _check_positions(positions: Any, batch: int, new_len: int) -> None:
    """Check the type and shape of position ids, if the caller gives some."""
    if positions is None:
        return
    if not isinstance(positions, Tensor):
        raise TypeError(f"position_ids must be a tensor, got {type(positions).__name__}")
    shape = positions.shape
    if positions.ndim < 2 or shape[-1] != new_len or shape[-2] not in (1, batch):
        raise ValueError(
            f"position_ids must be [batch, len] = [{batch}, {new_len}], one for each new token, "
            f"got {list(shape)}; leave them out, since the cache gives every row its own "
            "(generate makes them from attention_mask, which then has a wrong shape too)"
        )


def span_of(arguments: dict[str, Any], seen: int, start: int, stop: int) -> dict[str, Any]:
    """Cut a forward's arguments to the columns from ``start`` up to ``stop``."""
    arguments = dict(arguments)
    own_rows = (slice(None), slice(start, stop))
    for name in {*OF_TOKENS, "position_ids"} & arguments.keys():
        if arguments[name] is not None:
            # Position ids may have axes before the axis of rows.
            own = (..., slice(start, stop))
            arguments[name] = arguments[name][own if name == "position_ids" else own_rows]
    if isinstance(arguments.get("attention_mask"), Tensor):
        arguments["attention_mask"] = arguments["attention_mask"][:, : seen + stop]
    return arguments


def _without_mask(arguments: dict[str, Any], seen: SeenTokens, new_len: int) -> Incoming:
    if seen.padded:
        raise ValueError(
            "attention_mask must be 0 on the padding that the cache has read, got None (or all "
            f"ones, which generate replaces by None); pass the mask of all {seen.seen} tokens "
            f"seen and the {new_len} new ones"
        )
    valid = torch.ones(seen.batch, new_len, dtype=torch.bool, device=seen.valid.device)
    arguments = _with_positions(arguments, seen, valid)
    return Incoming(arguments, seen, None, valid, valid, padded=False)


def no_tokens(name: str, inputs: Tensor) -> ValueError:
    """Return the error for inputs without rows or without tokens."""
    shape = list(inputs.shape)
    return ValueError(f"{name} must hold at least one token in at least one row, got {shape}")


def other_batch(name: str, held: int, batch: int) -> ValueError:
    """Return the error for inputs of another number of rows than a cache holds."""
    return ValueError(
        f"{name} must have the batch size the cache holds, {held}, got {batch}; use a new "
        "PolicyCache or reset() this one"
    )


def check_step(mask: Tensor, seen: SeenTokens) -> None:
    """Check the mask ``[batch, seen + 1]`` with which `generate` decodes one token."""
    _check_shape(mask, seen.batch, seen.seen, 1)
    read_past(mask[:, :-1].to(seen.valid.device, torch.bool), seen, starts=False)


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


def read_past(past: Tensor, seen: SeenTokens, *, starts: bool) -> tuple[SeenTokens, Tensor | None]:
    """Compare the mask ``past`` ``[batch, seen]`` of tokens read before with what they were then.

    Only where a turn ``starts`` may the last tokens become padding. Returns what
    `SeenTokens.with_padding` does; the second entry is None if nothing moved.
    """
    if torch.equal(past, seen.valid):
        return seen, None
    if bool((past & ~seen.valid).any()):
        raise ValueError(
            "attention_mask must be 0 wherever it was 0 when the tokens were read, but it turns "
            "padding into tokens; reset() the cache and start again"
        )
    if not starts:
        raise ValueError(
            "attention_mask must not change for tokens already read, except where a new turn "
            "starts: call cache.start_turn() first"
        )
    # Only the tokens appended last may become padding: those after a row's end of text. No token
    # that remains has seen them.
    gone = seen.valid & ~past
    prompt_len = seen.seen - seen.appended.shape[1]
    stays_after = (past.flip(1).cumsum(dim=1) > 0).flip(1)
    if bool(gone[:, :prompt_len].any() | (gone & stays_after).any()):
        raise ValueError(
            "attention_mask must not turn tokens already read into padding, except tokens at a "
            "row's end that were generated since the last eviction; keep every row's columns "
            "where they were (do not pad the whole conversation again) and put padding between "
            "the turns"
        )
    return seen.with_padding(past)


def _with_positions(
    arguments: dict[str, Any], tokens: SeenTokens, columns: Tensor, *, padded: bool = False
) -> dict[str, Any]:
    """Add position ids that count each row's tokens, if none are given and columns would differ."""
    if arguments.get("position_ids") is not None or not (
        tokens.padded or tokens.skipped is not None or padded
    ):
        return arguments
    return {**arguments, "position_ids": tokens.rotary_positions_of(columns)}


def _reordered(arguments: dict[str, Any], order: Tensor, seen: int) -> dict[str, Any]:
    arguments = dict(arguments)
    for name in {*OF_TOKENS, "position_ids"} & arguments.keys():
        if arguments[name] is not None:
            first = arguments[name].ndim - 2 if name == "position_ids" else 0
            arguments[name] = take_columns(arguments[name], order, first, first + 1)
    for name in {"cross_attention_mask", "full_text_row_masked_out_mask"} & arguments.keys():
        if arguments[name] is not None:  # [batch, 1, new_len, ...], what a token sees of images
            arguments[name] = take_columns(arguments[name], order, 0, 2)
    mask = arguments["attention_mask"]
    new = mask[:, seen:].gather(1, order.to(mask.device))
    arguments["attention_mask"] = torch.cat([mask[:, :seen], new], dim=1)
    return arguments


def mask_of(seen: SeenTokens, valid: Tensor) -> Tensor | None:
    """Return the attention mask of the tokens seen and of new ones; None without padding."""
    padded = seen.padded or not bool(valid.all())
    return torch.cat([seen.valid, valid], dim=1).long() if padded else None


def take_columns(value: Tensor, columns: Tensor, row_axis: int = 0, token_axis: int = 1) -> Tensor:
    """Take the given columns of each row from a tensor with an entry for each token.

    Its ``row_axis`` comes before its ``token_axis``, and has size ``batch`` or 1. ``columns`` are
    ``[batch, count]``; -1 counts as 0.
    """
    index = columns.clamp(min=0).to(value.device)
    shape = [1] * value.ndim
    shape[row_axis], shape[token_axis] = index.shape
    sizes = list(value.shape)
    sizes[row_axis] = index.shape[0]
    value = value.expand(sizes)
    sizes[token_axis] = index.shape[1]
    return value.gather(token_axis, index.view(shape).expand(sizes))
