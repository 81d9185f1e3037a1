"""Train the model of word tasks, starting from the needle model's layers."""
