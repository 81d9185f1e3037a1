"""The model with long answers."""
