"""Bind the positional arguments of a call to their names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> dict[str, Any]:
    """Return all arguments of a module's call by their parameter names."""
    bound = signature(type(module).forward).bind_partial(module, *args, **(kwargs or {}))
    arguments = dict(bound.arguments)
    arguments.update(arguments.pop("kwargs", {}))
    arguments.pop("self")
    return arguments


@functools.lru_cache(maxsize=32)
def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a function's signature, cached after the first call."""
    return inspect.signature(function)
