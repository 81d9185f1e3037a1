"""Prompts made shorter by a small model, for engines in which no policy can stand."""
