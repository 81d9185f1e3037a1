"""The bundled model with answers longer than their prompts, and its task."""

from .task import (
    KINDS,
    MODEL_DIR,
    STEP_TOKENS,
    LongAnswerTask,
    LongPrompt,
    load_model,
    load_tokenizer,
    right_steps,
)

__all__ = [
    "KINDS",
    "MODEL_DIR",
    "STEP_TOKENS",
    "LongAnswerTask",
    "LongPrompt",
    "load_model",
    "load_tokenizer",
    "right_steps",
]
