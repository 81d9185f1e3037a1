"""Check optional packages, and say which extra installs a missing one."""

import importlib.util


class MissingExtraError(ImportError):
    """Raised when a package of an optional extra is missing; says how to install it."""


def require(package: str, *, extra: str) -> None:
    """Raise `MissingExtraError` if a package, by its import name, is not installed."""
    try:
        found = importlib.util.find_spec(package) is not None
    except ValueError:  # a module that was put into sys.modules by hand has no spec
        found = False
    if not found:
        raise MissingExtraError(
            f"{package} is not installed; get it with: pip install 'kvpolicy[{extra}]'"
        )
