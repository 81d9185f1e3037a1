"""Names what tests must know of versions of Transformers."""

from importlib.metadata import version

# Models of Transformers 5.17 behave differently; other models are refused or read correctly on it.
_VERSION = tuple(map(int, version("transformers").split(".")[:2]))
OLD = _VERSION < (5, 23)
# The attention of these families has shown no queries before 5.24.
NO_QUERIES = ("codegen", "gptj") if _VERSION < (5, 24) else ()
