"""Walk over a model's tree of modules, and bind the arguments of a module's call to their names.

A cache looks through all modules of a model when it is attached, and modules may have changed since
the last time, so that nothing is remembered. Torch's own `named_modules` calls one generator for
each level of the tree and each module in it; here it is one loop.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def modules_of(outer: nn.Module) -> list[nn.Module]:
    """Return a module and all modules inside it, each once, in the order of `nn.Module.modules`."""
    found: dict[nn.Module, None] = {}
    stack: list[nn.Module | None] = [outer]
    while stack:
        module = stack.pop()
        if module is not None and module not in found:
            found[module] = None
            stack += reversed(module._modules.values())
    return list(found)


def path_to(outer: nn.Module, inner: nn.Module) -> dict[str, nn.Module]:
    """Return the modules from one down to one inside it, both included, by their names in it.

    If several paths lead to it, it is the first in the order of `nn.Module.named_modules`.
    """
    seen: set[nn.Module] = set()
    paths: list[tuple[tuple[str, nn.Module], ...]] = [(("", outer),)]
    while paths:
        path = paths.pop()
        name, module = path[-1]
        if module is inner:
            return dict(path)
        if module not in seen:
            seen.add(module)
            inside = ((f"{name}.{key}".lstrip("."), each) for key, each in module._modules.items())
            paths += reversed([(*path, (key, each)) for key, each in inside if each is not None])
    return {}


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
