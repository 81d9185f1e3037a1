"""Which composition answers best at which cost: every method and more, on equal terms."""
