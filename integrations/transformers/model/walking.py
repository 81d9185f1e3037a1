"""Walk over a model's tree of modules, in a loop instead of torch's nested generators.

A cache looks through all modules of a model when it is attached, and modules may have changed since
the last time, so that nothing is remembered. Torch's own `named_modules` calls one generator for
each level of the tree and each module in it.
"""

from __future__ import annotations

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
    found: dict[nn.Module, tuple[str, nn.Module | None]] = {}  # own name, and the module around
    stack: list[tuple[nn.Module | None, str, nn.Module | None]] = [(outer, "", None)]
    while stack and inner not in found:
        module, name, around = stack.pop()
        if module is not None and module not in found:
            found[module] = name, around
            stack += [(each, key, module) for key, each in reversed(module._modules.items())]
    upwards: list[tuple[str, nn.Module]] = []
    at: nn.Module | None = inner if inner in found else None
    while at is not None:
        name, around = found[at]
        upwards.append((name, at))
        at = around
    path: dict[str, nn.Module] = {}
    names: list[str] = []
    for name, module in reversed(upwards):
        names += [name] if name else []
        path[".".join(names)] = module
    return path
