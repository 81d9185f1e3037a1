"""Where a model's attention goes, and how far a drop moves its output."""
