"""Load tasks of lm-evaluation-harness, from local data where there is any."""

from kvpolicy.evaluation.tasks.harness_tasks.loading import FOLDER, load_tasks, task_manager

__all__ = ["FOLDER", "load_tasks", "task_manager"]
