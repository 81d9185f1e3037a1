"""Measure where a model's attention goes, and how far dropping tokens moves its output."""
