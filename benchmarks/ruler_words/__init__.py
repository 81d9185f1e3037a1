"""Measure methods on the word tasks of the bundled model."""
