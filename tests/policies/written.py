"""Methods and parts as one writes them."""

from math import inf, nan
from typing import Any

from torch import tensor

from kvpolicy import Budget, CachePolicy, DecodingEviction, Repetition, policies

NAMES: dict[str, Any] = {
    **{name: getattr(policies, name) for name in policies.__all__},
    **{each.__name__: each for each in (Budget, CachePolicy, DecodingEviction, Repetition)},
    **{"inf": inf, "nan": nan, "tensor": tensor},
}


def made(written: str) -> Any:
    """What the expression ``written`` makes, in which every public name is known."""
    return eval(written, {**NAMES})
