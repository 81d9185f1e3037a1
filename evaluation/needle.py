"""The bundled needle model and its task, from `kvpolicy.evaluation.tasks.needle`."""

from kvpolicy.evaluation.tasks.needle import (
    MODEL_DIR,
    NeedlePrompt,
    NeedleTask,
    exact_match,
    load_model,
    load_tokenizer,
)

__all__ = [
    "MODEL_DIR",
    "NeedlePrompt",
    "NeedleTask",
    "exact_match",
    "load_model",
    "load_tokenizer",
]
