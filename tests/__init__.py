"""Tests, and the slow reference they share."""
