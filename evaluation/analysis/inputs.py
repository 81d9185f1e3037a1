"""Check the arguments of an analysis before anything is computed.

Each function raises TypeError for what is of another type, and ValueError for what is out of its
range, as the messages say.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kvpolicy.checks import check_count, check_kind
from kvpolicy.evaluation.defaults import CRITERIA

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_prompts(
    model: PreTrainedModel, inputs: Sequence[Sequence[int] | Tensor], window_size: int
) -> list[Tensor]:
    """Check a model, and prompts ``[prompt_len]`` or ``[1, prompt_len]`` longer than the window.

    Returns:
        For each, int64 ``[1, prompt_len]`` on the model's device.
    """
    check_kind("model", model, nn.Module)
    if model.training:
        raise ValueError("model must be in evaluation mode, got training mode; call model.eval()")
    check_count("window_size", window_size, minimum=1)
    if isinstance(inputs, str | Tensor) or not isinstance(inputs, Sequence):
        got = type(inputs).__name__
        raise TypeError(f"inputs must be a sequence of prompts' token ids, got {got}; pass a list")
    if not inputs:
        raise ValueError("inputs must hold at least one prompt, got none")
    size = int(model.get_input_embeddings().num_embeddings)
    prompts = []
    for index, ids in enumerate(inputs):
        name = f"prompt {index}"
        try:
            row = torch.as_tensor(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name} must be the token ids of one prompt: {error}") from None
        row = row[0] if row.ndim == 2 and len(row) == 1 else row
        if row.ndim != 1:
            raise ValueError(
                f"{name} must be [prompt_len] or [1, prompt_len], got shape "
                f"{list(row.shape)}; pass the rows of a batch one by one"
            )
        if len(row) <= window_size:
            raise ValueError(
                f"{name} must be longer than window_size, {window_size} tokens, got {len(row)}"
            )
        if row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
            raise TypeError(f"{name} must be ints, got {row.dtype}")
        for got in (int(row.min()), int(row.max())):
            if not 0 <= got < size:
                raise ValueError(f"{name} must be of token ids in [0, {size - 1}], got {got}")
        prompts.append(row.to(device=model.device, dtype=torch.int64)[None])
    return prompts


def check_ks(ks: Sequence[int], prompt_len: int) -> None:
    """Check numbers of top tokens of a prompt."""
    for k in ks:
        if check_count("k", k, minimum=1) > prompt_len:
            raise ValueError(
                f"k must be at most the prompt's {prompt_len} tokens, got {k}; lower it or take a "
                "longer prompt"
            )


def check_layers(name: str, layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Check that a model has these layers; return them ascending, each once."""
    check_kind(name, layers, Sequence)
    if not layers:
        raise ValueError(f"{name} must be at least one, got none")
    for layer in layers:
        if check_count(name, layer) >= num_layers:
            raise ValueError(
                f"{name} must be in [0, {num_layers - 1}] for a model of {num_layers} layers, got "
                f"{layer}"
            )
    return tuple(sorted(set(layers)))


def check_criterion(criterion: str, tolerance: float) -> None:
    """Check the name of a criterion for choosing the drop layer, and its tolerance."""
    if criterion not in CRITERIA:
        raise ValueError(f"criterion must be one of {', '.join(CRITERIA)}, got {criterion!r}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, numbers.Real):
        raise TypeError(f"tolerance must be a number above 0, got {tolerance!r}")
    if not 0 < float(tolerance) < math.inf:
        raise ValueError(f"tolerance must be above 0 and finite, got {tolerance}")
