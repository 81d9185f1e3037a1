"""Shorten prompts with a small model, for engines that cannot run a policy."""
