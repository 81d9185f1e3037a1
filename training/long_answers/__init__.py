"""Train the bundled model with long answers."""
