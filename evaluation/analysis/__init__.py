"""Measure which tokens a model attends to, and how far dropping tokens changes its output."""
