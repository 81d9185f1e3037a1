"""Provide the word tasks as tasks of lm-evaluation-harness."""
