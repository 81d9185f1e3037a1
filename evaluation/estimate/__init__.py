"""Estimate weights, held keys and values and prefill compute from a model's configuration."""
