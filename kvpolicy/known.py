"""Deprecated: `kvpolicy.host_counts` under its earlier name."""

from __future__ import annotations

import warnings
from typing import Any

from kvpolicy import host_counts


def __getattr__(name: str) -> Any:
    """Take a name from `kvpolicy.host_counts`."""
    found = getattr(host_counts, name)
    warnings.warn(
        f"kvpolicy.known.{name} is deprecated, use kvpolicy.host_counts.{name}",
        DeprecationWarning,
        stacklevel=2,
    )
    return found
