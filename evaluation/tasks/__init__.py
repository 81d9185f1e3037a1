"""Provide prompts: of the bundled models' tasks, from files, and of the harness's tasks."""
