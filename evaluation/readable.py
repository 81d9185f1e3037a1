"""Encode prompts, and check that a model can read them: words it knows, and enough positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvpolicy.evaluation.models import Loaded

# Extra rows that a position embedding may have before the tokens' positions (OPT has 2).
_ROWS_BEFORE = 2


def check_known(tokenizer: Any, ids: Sequence[int], what: str) -> None:
    """Raise ValueError if a tokenizer turned a text into nothing or only unknown words.

    A model's folder without a tokenizer is read like that: some classes then make an empty one.
    Special tokens count as unknown.
    """
    if not set(ids) <= set(tokenizer.all_special_ids):
        return
    read = "no token" if not ids else f"{len(ids):,} unknown or special token{'s' * (len(ids) > 1)}"
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        remedy = "it has no words at all: save the model's own tokenizer into its folder"
    else:
        remedy = "give a text in words that it knows, or a model with another tokenizer"
    raise ValueError(f"{what} must have words that the tokenizer knows, got {read}; {remedy}")


def check_whole(tokenizer: Any, ids: Sequence[int], what: str) -> None:
    """Raise ValueError if a text contains words unknown to a tokenizer, or none.

    Unknown words have no text: an answer with one would count as right where it is left out.
    """
    check_known(tokenizer, ids, what)
    if tokenizer.unk_token_id in ids:
        raise ValueError(
            f"{what} must have only words that the tokenizer knows, got an unknown one; give "
            "another answer, or a model with another tokenizer"
        )


def positions_of(model: PreTrainedModel) -> int | None:
    """Return how many positions a model is made for; None if its configuration does not say."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def reads_chat(loaded: Loaded, chat: bool | None) -> bool:
    """True if a prompt is a user's turn of a chat; None asks for it if there is a template."""
    template = getattr(loaded.tokenizer, "chat_template", None)
    if chat and not template:
        raise ValueError(
            f"--chat needs a chat template, but the tokenizer of {loaded.name} has none"
        )
    return bool(template) if chat is None else chat


def encode_prompt(loaded: Loaded, text: str, *, chat: bool | None = None) -> Tensor:
    """Encode a prompt as token ids, int64 ``[1, prompt_len]``; for ``chat`` see `reads_chat`."""
    as_chat = reads_chat(loaded, chat)
    ids = loaded.tokenizer(text)["input_ids"]
    check_known(loaded.tokenizer, ids, "prompt")
    if as_chat:
        turns = [{"role": "user", "content": text}]
        ids = loaded.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True
        )["input_ids"]
    return torch.tensor([ids], device=loaded.model.device)


def check_positions(
    loaded: Loaded,
    prompt_len: int,
    answer_len: int = 0,
    *,
    beyond: bool = False,
    what: str = "a prompt",
    remedy: str = "a shorter prompt",
) -> None:
    """Raise ValueError if prompt and answer are longer than the model's positions.

    With ``beyond`` (``--beyond-positions``), only if the model has an embedding for each position.
    ``what`` is the prompt in messages, and ``remedy`` what to give in its place.
    """
    limit = positions_of(loaded.model)
    if limit is None or prompt_len + answer_len <= limit:
        return
    answer = f" and an answer of up to {answer_len:,}" if answer_len else ""
    got = f"got {what} of {prompt_len:,} tokens{answer}"
    if not beyond:
        raise ValueError(
            f"prompts must fit into the {limit:,} positions of {loaded.name}, {got}; give "
            f"{remedy} or another --model, or --beyond-positions to read it anyway"
        )
    if _has_table(loaded.model, limit):
        raise ValueError(
            f"--beyond-positions must not be given with {loaded.name}, which has only {limit:,} "
            f"position embeddings, {got}; give {remedy} or another --model"
        )


def positions_notes(model: PreTrainedModel, longest: int) -> list[str]:
    """Return a note if the longest prompt exceeds the model's positions, else nothing."""
    limit = positions_of(model)
    if limit is None or longest <= limit:
        return []
    return [
        f"Prompts of up to {longest:,} tokens exceed the {limit:,} positions that the model is "
        "made for."
    ]


def _has_table(model: PreTrainedModel, limit: int) -> bool:
    """True if a model looks up position embeddings in a table."""
    words = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    return any(
        isinstance(module, nn.Embedding)
        and id(module) not in words
        and limit <= module.num_embeddings <= limit + _ROWS_BEFORE
        for module in model.modules()
    )
