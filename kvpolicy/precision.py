"""Compute scores in full precision, also inside of a user's autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_AS_IS: AbstractContextManager[Any] = nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast, which would round scores so that many tokens tie."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else _AS_IS
