"""Check optional packages, and say which extra installs a missing one."""

from __future__ import annotations

import importlib.util


class MissingExtraError(ImportError):
    """Raised when a package of an optional extra is missing; says how to install it."""


def require(package: str, *, extra: str) -> None:
    """Check that a package of an optional extra is installed.

    Args:
        package: Its import name.
        extra: The extra of kvpolicy that brings it.

    Raises:
        MissingExtraError: It is not.

    Example:
        >>> require("torch", extra="none: torch always comes with kvpolicy")
    """
    try:
        found = importlib.util.find_spec(package) is not None
    except ValueError:  # a module that was put into sys.modules by hand has no spec
        found = False
    if not found:
        raise MissingExtraError(
            f"{package} is not installed; get it with: pip install 'kvpolicy[{extra}]'"
        )
