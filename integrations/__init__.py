"""Connects policies to other libraries."""
