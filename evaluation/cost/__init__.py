"""Estimate the operations and bytes of a policy before anything runs."""
