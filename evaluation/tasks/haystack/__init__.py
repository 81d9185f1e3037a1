"""A needle in a haystack: one sentence in essays, over a grid of lengths and depths."""

from kvpolicy.evaluation.tasks.haystack.grid import Haystack

__all__ = ["Haystack"]
