"""Prompts: from the bundled models' tasks, from files, and from the harness's tasks."""
