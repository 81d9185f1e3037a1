"""Combines several scorers by sum or maximum; defined in `kvpolicy.scorer`, for its operators."""

from kvpolicy.scorer import MaxScorer, SumScorer

__all__ = ["MaxScorer", "SumScorer"]
