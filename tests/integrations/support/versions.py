"""Detects versions of Transformers on which tests must be skipped."""

from importlib.metadata import version

# Models of Transformers 5.17 behave differently; other models are refused or read correctly on it.
OLD = tuple(map(int, version("transformers").split(".")[:2])) < (5, 23)
