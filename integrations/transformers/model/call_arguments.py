"""A call's arguments by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> dict[str, Any]:
    """A call's arguments by name."""
    bound = signature(type(module).forward).bind_partial(module, *args, **(kwargs or {}))
    arguments = dict(bound.arguments)
    arguments.update(arguments.pop("kwargs", {}))
    arguments.pop("self")
    return arguments


@functools.lru_cache(maxsize=32)
def signature(function: Callable[..., Any]) -> inspect.Signature:
    """A function's, looked up once."""
    return inspect.signature(function)
