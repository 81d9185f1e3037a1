"""Encode a prompt as the tokens that a model reads, as a text or as a user's turn."""

import torch

from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.readable import check_known


def reads_chat(loaded: Loaded, chat: bool | None) -> bool:
    """Return whether a prompt is a user's turn of a chat; None is yes if there is a template.

    Raises:
        ValueError: A chat is asked for and the tokenizer has no template.
    """
    template = getattr(loaded.tokenizer, "chat_template", None)
    if chat and not template:
        raise ValueError(
            f"--chat needs a chat template, but the tokenizer of {loaded.name} has none"
        )
    return bool(template) if chat is None else chat


def encode_prompt(loaded: Loaded, text: str, *, chat: bool | None = None) -> torch.Tensor:
    """Encode a prompt's text as the token ids that a model reads.

    Args:
        loaded: The model and its tokenizer.
        text: The prompt.
        chat: Whether it is a user's turn of a chat; None for yes if the tokenizer has a template.

    Returns:
        int64 ``[1, prompt_len]`` on the model's device.

    Raises:
        ValueError: A template is asked for and there is none, or the tokenizer knows no word of
            the text.
    """
    as_chat = reads_chat(loaded, chat)
    ids = loaded.tokenizer(text)["input_ids"]
    check_known(loaded.tokenizer, ids, "prompt")
    if as_chat:
        turns = [{"role": "user", "content": text}]
        ids = loaded.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True
        )["input_ids"]
    return torch.tensor([ids], device=loaded.model.device)
