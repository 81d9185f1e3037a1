"""Load tasks of lm-evaluation-harness, from local data where there is any."""

from kvpolicy.evaluation.tasks.harness_tasks.loading import (
    FOLDER,
    knowing,
    load_tasks,
    task_manager,
)

__all__ = ["FOLDER", "knowing", "load_tasks", "task_manager"]
