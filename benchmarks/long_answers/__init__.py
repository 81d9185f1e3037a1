"""Measure rules that bound long answers, on the bundled model with long answers."""
