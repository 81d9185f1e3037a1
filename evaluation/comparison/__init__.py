"""Compare methods by accuracy, memory and speed, as a table, JSON and pictures."""
