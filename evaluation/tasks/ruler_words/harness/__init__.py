"""The word tasks as tasks of lm-evaluation-harness."""
