"""The haystack task: one sentence hidden in essays, at several lengths and depths."""

from kvpolicy.evaluation.tasks.haystack.grid import Haystack

__all__ = ["Haystack"]
