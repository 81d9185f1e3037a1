"""Measure decoding rules on the bundled model with long answers."""
