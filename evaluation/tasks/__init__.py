"""What is asked of a model: the bundled task and prompts from a file."""
