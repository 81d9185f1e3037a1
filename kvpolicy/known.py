"""Deprecated: the old name of the module `kvpolicy.host_counts`."""

from __future__ import annotations

import warnings
from typing import Any

from kvpolicy import host_counts


def __getattr__(name: str) -> Any:
    """Return a name that moved to `kvpolicy.host_counts`, with a deprecation warning."""
    found = getattr(host_counts, name)
    warnings.warn(
        f"kvpolicy.known.{name} is deprecated, use kvpolicy.host_counts.{name}",
        DeprecationWarning,
        stacklevel=2,
    )
    return found
