"""The error classes of kvpolicy.

Every message names the argument, what it must be, the value given and, if there is one, a remedy.
"""

from __future__ import annotations

import threading

__all__ = [
    "CacheInUseError",
    "KVPolicyError",
    "NotAttachedError",
    "ShapeError",
    "UnknownPolicyError",
    "UnsupportedGenerationError",
    "UnsupportedModelError",
]


class KVPolicyError(ValueError):
    """Base class of all of kvpolicy's own errors."""


class ShapeError(KVPolicyError):
    """Raised when tensor axes do not fit together; the message names axes and sizes."""


class UnknownPolicyError(KVPolicyError):
    """Raised for an unregistered policy or part name; the message lists the known names."""


class NotAttachedError(KVPolicyError):
    """Raised when a cache is used without being attached to the model, as its policy needs."""

    @classmethod
    def with_cache_as(cls, argument: str) -> NotAttachedError:
        """Make the error with the name of the argument by which a model takes its cache."""
        return cls(
            "cache must be attached to the model for its policy to act: use "
            f"model.generate({argument}=cache), or call the model inside "
            "`with cache.attached(model):`"
        )


class CacheInUseError(KVPolicyError):
    """Raised when two threads use the same cache at once."""

    @classmethod
    def by(cls, thread: threading.Thread) -> CacheInUseError:
        """Make the error with the name of the thread that is using the cache."""
        return cls(
            f"cache must be used by one thread at a time, but thread {thread.name!r} is using it; "
            "give every thread a copy of its own (copy.deepcopy(cache)) or a new cache"
        )


class UnsupportedModelError(KVPolicyError):
    """Raised for a model on which the policy would give wrong results."""


class UnsupportedGenerationError(KVPolicyError):
    """Raised for a generation mode or cache operation that would give wrong results."""
