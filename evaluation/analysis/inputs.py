"""Check the inputs of an analysis before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kvpolicy.checks import check_count, check_kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_prompt(model: PreTrainedModel, input_ids: Sequence[int] | Tensor) -> Tensor:
    """Check that a model is in evaluation mode and that prompt token ids are in its vocabulary.

    Args:
        model: The model that is to read them.
        input_ids: Token ids, ``[context_len]`` or ``[1, context_len]``.

    Returns:
        int64 ``[1, context_len]`` on the model's device.

    Raises:
        TypeError: ``model`` is no model, or the ids are not ints.
        ValueError: There are none, the shape is another, or an id is outside the vocabulary; or
            the model is in training mode.
    """
    check_kind("model", model, nn.Module)
    if model.training:
        raise ValueError("model must be in evaluation mode, got training mode; call model.eval()")
    try:
        tokens = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"input_ids must be the token ids of one prompt: {error}") from None
    row = tokens[0] if tokens.ndim == 2 and tokens.shape[0] == 1 else tokens
    if row.ndim != 1 or not row.numel():
        raise ValueError(
            "input_ids must be one prompt of at least one token, [context_len] or "
            f"[1, context_len], got shape {list(tokens.shape)}"
        )
    if row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        raise TypeError(f"input_ids must be ints, got {row.dtype}")
    lowest, highest = int(row.min()), int(row.max())
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"input_ids must be in [0, {vocabulary - 1}], the model's vocabulary, got "
            f"{lowest if lowest < 0 else highest}"
        )
    return row.to(device=model.device, dtype=torch.int64)[None]


def check_window(window_size: int, context_len: int) -> None:
    """Check that a prompt has at least as many tokens as the observation window.

    Raises:
        TypeError: ``window_size`` is not an int.
        ValueError: It is below 1, or the prompt is shorter.
    """
    check_count("window_size", window_size, minimum=1)
    if window_size > context_len:
        raise ValueError(
            f"window_size must be at most the prompt's {context_len} tokens, got {window_size}; "
            "lower it or take a longer prompt"
        )


def check_prompts(
    model: PreTrainedModel, inputs: Sequence[Sequence[int] | Tensor], window_size: int
) -> list[Tensor]:
    """Check several prompts' token ids, and that none is shorter than the observation window.

    Returns:
        See `check_prompt`, one for each.

    Raises:
        TypeError: See `check_prompt` and `check_window`.
        ValueError: See `check_prompt` and `check_window`; or there are no prompts.
    """
    if not isinstance(inputs, (Sequence, Tensor)):
        raise TypeError(f"inputs must be a sequence of prompts' token ids, got {inputs!r}")
    prompts = [check_prompt(model, each) for each in inputs]
    if not prompts:
        raise ValueError("inputs must hold at least one prompt, got none")
    check_window(window_size, min(prompt.shape[1] for prompt in prompts))
    return prompts


def check_saliency(saliency: Tensor, *axes: str) -> None:
    """Check that a saliency is a floating-point tensor with the expected axes.

    Raises:
        TypeError: It is none.
        ValueError: It has other axes, or one of them is empty.
    """
    check_kind("saliency", saliency, Tensor)
    if not saliency.is_floating_point():
        raise TypeError(f"saliency must be of floats, got {saliency.dtype}")
    if saliency.ndim != len(axes) or not saliency.numel():
        raise ValueError(
            f"saliency must be [{', '.join(axes)}], none of them 0, got {list(saliency.shape)}"
        )


def check_k(k: int, context_len: int, name: str = "k") -> None:
    """Check that ``k``, a number of top tokens, is between 1 and a prompt's length.

    Raises:
        TypeError: It is not an int.
        ValueError: It is below 1, or the prompt is shorter.
    """
    check_count(name, k, minimum=1)
    if k > context_len:
        raise ValueError(
            f"{name} must be at most the prompt's {context_len} tokens, got {k}; lower it or take "
            "a longer prompt"
        )


def check_ks(ks: Sequence[int], context_len: int) -> None:
    """Check several numbers ``k`` of top tokens; see `check_k`.

    Raises:
        TypeError: They are no sequence, or one is not an int.
        ValueError: There is none, or one is out of its range.
    """
    check_kind("ks", ks, Sequence)
    if not len(ks):
        raise ValueError("ks must hold at least one number of tokens, got none")
    for k in ks:
        check_k(k, context_len, "each of ks")


def check_layers(layers: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Check that layer indices exist in the model.

    Args:
        layers: From 0, each once; None for all.
        num_layers: Layers of the model.

    Returns:
        The layers, ascending.

    Raises:
        TypeError: One is not an int.
        ValueError: There is none, one outside the model, or one twice.
    """
    if layers is not None:
        check_kind("layers", layers, Sequence)
    if layers is None:
        return tuple(range(num_layers))
    for layer in layers:
        if check_count("each of layers", layer) >= num_layers:
            raise ValueError(
                f"each of layers must be in [0, {num_layers - 1}] for a model of {num_layers} "
                f"layers, got {layer}"
            )
    if not layers or len(set(layers)) < len(layers):
        raise ValueError(f"layers must hold at least one layer, each once, got {list(layers)}")
    return tuple(sorted(layers))
