"""What differs between the outputs of two calls of `generate`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

FIELDS = (
    "sequences",
    "sequences_scores",
    "beam_indices",
    "scores",
    "logits",
    "hidden_states",
    "attentions",
)
# Two orders of adding the same numbers, over some layers.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def differences(own: Any, other: Any, mask: Tensor | None) -> dict[str, str]:
    """Where two outputs differ: by field, how."""
    own, other = _by_field(own), _by_field(other)
    found = {}
    for field in FIELDS:
        how = _difference(own.get(field), other.get(field), field, mask)
        if how is not None:
            found[field] = how
    return found


def _by_field(output: Any) -> dict[str, Any]:
    return {"sequences": output} if isinstance(output, Tensor) else dict(output)


def _difference(
    own: Any, other: Any, field: str, mask: Tensor | None, where: str = ""
) -> str | None:
    if own is None and other is None:
        return None
    if isinstance(own, (tuple, list)) and isinstance(other, (tuple, list)):
        if len(own) != len(other):
            return f"{len(own)} and {len(other)} of them{where}"
        for index, pair in enumerate(zip(own, other, strict=True)):
            how = _difference(*pair, field, mask, f"{where}[{index}]")
            if how is not None:
                return how
        return None
    if not (isinstance(own, Tensor) and isinstance(other, Tensor)):
        return f"{type(own).__name__} and {type(other).__name__}{where}"
    if field == "attentions":
        own, other = _as_wide(own, other)
    if own.shape != other.shape:
        return f"{list(own.shape)} and {list(other.shape)}{where}"
    if not own.is_floating_point():
        return None if torch.equal(own, other) else f"other numbers{where}"
    real = _real(own, field, mask)
    own, other = own.where(real, 0.0), other.where(real, 0.0)
    allowed = TOLERANCE[own.dtype]
    if torch.allclose(own, other, rtol=allowed, atol=allowed, equal_nan=True):
        return None
    return f"off by {float((own - other).abs().nan_to_num(torch.inf, torch.inf).max()):.1e}{where}"


def _as_wide(own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Attentions to the same keys: a key that one does not know has no weight in the other.

    Under a sliding window `generate`'s own cache has the columns of the window. A policy's cache
    has those of all that it holds, with zeros outside of the window.
    """
    width = max(own.shape[-1], other.shape[-1])
    return pad(own, (width - own.shape[-1], 0)), pad(other, (width - other.shape[-1], 0))


def _real(value: Tensor, field: str, mask: Tensor | None) -> Tensor:
    """Which of the numbers belong to tokens, in a shape that fits the value's."""
    everything = torch.ones((), dtype=torch.bool, device=value.device)
    if mask is None or field not in ("hidden_states", "attentions"):
        return everything
    # Beams and answers of one row stand beside each other.
    mask = mask.bool().to(value.device).repeat_interleave(len(value) // len(mask), dim=0)
    new = value.shape[-2] - mask.shape[1]
    if new < 0:
        return everything  # a decoded token, which is always one
    mask = pad(mask, (0, new), value=True)  # a draft may come with the prompt
    tokens = mask.view(len(mask), *[1] * (value.ndim - 3), mask.shape[1], 1)
    if field == "attentions" and value.shape[-1] == mask.shape[1]:
        return tokens & mask[:, None, None]
    return tokens
