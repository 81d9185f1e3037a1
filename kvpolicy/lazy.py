"""Public names of a package that are imported only when they are used.

Importing torch takes a second, Transformers several: a package that imports neither until one of
its names is used lets the `kvpolicy` command print its help at once.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a package with lazy public names.

    The public names are given by the module that defines them. These modules of the package are
    attributes of it as well, as if it had imported them.
    """
    defined = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in defined:
            found = getattr(import_module(defined[name]), name)
        elif any(f"{each}.".startswith(f"{package}.{name}.") for each in modules):
            found = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *defined})

    return get, names, sorted(defined)
