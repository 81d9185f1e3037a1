"""Define the haystack task: one sentence hidden in essays, over lengths and depths."""

from kvpolicy.evaluation.tasks.haystack.grid import Haystack

__all__ = ["Haystack"]
