"""Stream one completion under a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvpolicy.evaluation.models import Loaded
from kvpolicy.policy import CachePolicy

if TYPE_CHECKING:
    from kvpolicy.integrations.transformers import PolicyCache


def stream(
    loaded: Loaded,
    input_ids: torch.Tensor,
    policy: CachePolicy,
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    seed: int = 0,
    on_text: Callable[[], None] = lambda: None,
) -> PolicyCache:
    """Generate a completion and write it to stdout token by token.

    Args:
        loaded: The model and its tokenizer.
        input_ids: ``[1, prompt_len]``.
        policy: Which tokens to keep.
        max_new_tokens: At most so many tokens.
        temperature: Of sampling, above 0; None for greedy.
        seed: Of sampling.
        on_text: Called before each piece of text is written.

    Returns:
        The cache, as it is after the last token.
    """
    from kvpolicy.integrations.transformers import PolicyCache

    cache = PolicyCache(policy)
    loaded.model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        cache=cache,
        max_new_tokens=max_new_tokens,
        **streaming(loaded, temperature=temperature, seed=seed, on_text=on_text),
    )
    return cache


def streaming(
    loaded: Loaded,
    *,
    temperature: float | None = None,
    seed: int = 0,
    on_text: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return arguments of `generate` that stream one answer; see `stream`. Sets torch's seed."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            on_text()
            super().on_finalized_text(text, stream_end)

    sampling: dict[str, Any] = {"do_sample": False}
    if temperature is not None:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature}
    config = loaded.model.generation_config
    end = config.eos_token_id
    pad = config.pad_token_id
    if pad is None:  # not used for one row, but required by generate
        pad = end[0] if isinstance(end, list) else end
    return {
        "streamer": Streamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True),
        "pad_token_id": pad,
        **sampling,
    }
