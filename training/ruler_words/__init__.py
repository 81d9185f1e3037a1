"""Train the model of the word tasks, starting from the needle model's layers."""
