"""Methods side by side: accuracy, memory and speed, as a table, JSON and pictures."""
