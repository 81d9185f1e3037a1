"""Combines several scorers by sum or by maximum; `kvpolicy.scorer` has them, for its operators."""

from kvpolicy.scorer import MaxScorer, SumScorer

__all__ = ["MaxScorer", "SumScorer"]
