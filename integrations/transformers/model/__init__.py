"""A model taken apart: its layers, how a cache attaches to it, how its queries are seen."""
