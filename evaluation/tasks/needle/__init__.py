"""The bundled needle model, 0.87 million parameters for any CPU, and its task.

`NeedleTask` writes prompts with known answers, `load_model` gives the model that was trained to
answer them. Together they show in minutes, without a download, what a policy costs: a lookup needs
the pair that was asked for, a lookup through a link needs the link and then the pair, two layers of
the model apart.
"""

from .task import (
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
