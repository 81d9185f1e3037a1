"""A small trained model that answers questions in seconds, for tests alone, with its task.

A prompt hides pairs (``KEY k v1 v2 v3 <end>``) and links (``LINK a k``) in filler; the question is
its last two tokens. ``QUERY k`` asks for the values of a key, ``QUERY2 a`` for those of the key
that a link leads to, which the model finds two layers later. The model is a Llama of 6 layers, 8
query and 2 KV heads of 16, trained by ``training/needle`` of the revision ``cb518e3c``.
"""

# ruff: noqa: F401 (the names are those of the package)

from tests.needle.task import (
    MODEL_DIR,
    NeedlePrompt,
    NeedleTask,
    load_model,
    load_tokenizer,
    needle_prompts,
    text_of,
)
