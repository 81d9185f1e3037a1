"""Train the bundled model whose answers are long."""
