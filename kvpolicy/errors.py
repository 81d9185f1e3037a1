"""The errors kvpolicy raises where a plain ``ValueError`` or ``TypeError`` would say too little.

Every message names the argument, what it must be, what came and, where there is one, the remedy.
"""

from __future__ import annotations

import threading


class KVPolicyError(ValueError):
    """Base of the package's own errors: catch it to catch them all."""


class ShapeError(KVPolicyError):
    """A tensor's axes do not fit together; the message names axes and sizes."""


class UnknownPolicyError(KVPolicyError):
    """No policy or part is registered under a name; the message lists those that are."""


class NotAttachedError(KVPolicyError):
    """A cache whose policy has to reach the model was used without being attached to it."""


class CacheInUseError(KVPolicyError):
    """A cache is used from two threads at once."""

    @classmethod
    def by(cls, thread: threading.Thread) -> CacheInUseError:
        """Make the error that names the thread that has the cache."""
        return cls(
            f"cache must be used by one thread at a time, but thread {thread.name!r} is using it; "
            "give every thread a copy of its own (copy.deepcopy(cache)) or a new cache"
        )


class UnsupportedModelError(KVPolicyError):
    """The model has a structure that the policy cannot be applied to without being wrong."""


class UnsupportedGenerationError(KVPolicyError):
    """A mode of generation, or an operation on a cache, that is not right with a policy yet."""
