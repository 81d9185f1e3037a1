"""Prompts: from the bundled model's task, from files, and from the harness's tasks."""
