"""Compares tensors in tests of the slow references."""

from torch import Tensor


def max_error(ours: Tensor, theirs: Tensor) -> float:
    """Returns the largest difference between two tensors of one shape."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())
