"""The bundled model of English-like word tasks after RULER's, and its tasks."""

from .questions import KINDS
from .task import MODEL_DIR, WordPrompt, load_model, load_tokenizer, prompts, score

__all__ = [
    "KINDS",
    "MODEL_DIR",
    "WordPrompt",
    "load_model",
    "load_tokenizer",
    "prompts",
    "score",
]
