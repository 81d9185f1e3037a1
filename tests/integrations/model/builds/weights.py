"""Random weights under which a model attends peakedly.

Freshly initialised models attend almost uniformly: a key too many or too few hardly shows. Here the
projections to queries and keys are scaled up, while the residual stream stays of about unit size.
"""

import math

import torch
from torch import Tensor, nn

SCALE = 1.8

_QUERIES_AND_KEYS = (
    "q_proj",
    "k_proj",
    "q_b_proj",
    "kv_a_proj",
    "kv_b_proj",
    "qkv",
    "query_key_value",
    "c_attn",
    "Wqkv",
    ".query",
    ".key",
    "q_lin",
    "k_lin",
    "project_q",
    "project_k",
    "att_proj",
)
_QUERY_AND_KEY_NORMS = (
    "q_norm",
    "k_norm",
    "q_layernorm",
    "k_layernorm",
    "query_layernorm",
    "key_layernorm",
)
_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "lm_head", "embed_out")


@torch.no_grad()
def fill(model: nn.Module, generator: torch.Generator, scale: float) -> None:
    """Overwrites every parameter with draws whose spread depends on what the parameter is for.

    Args:
        model: any model of Transformers.
        generator: of the draws.
        scale: gain of the projections to queries and to keys; scores before the softmax then have
            a spread of about its square.
    """
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point():
                continue
            draw = torch.randn(parameter.shape, generator=generator)
            path = f"{prefix}.{name}"
            if isinstance(module, nn.Embedding):
                draw = draw / float(getattr(module, "embed_scale", 1.0))
            elif parameter.ndim <= 1 or "norm" in path:
                draw = _near_initial(parameter, draw, path, scale)
            else:
                draw = draw * _gain(path, scale) / math.sqrt(_fan_in(module, parameter))
            parameter.copy_(draw)


def _near_initial(parameter: Tensor, draw: Tensor, path: str, scale: float) -> Tensor:
    """Vectors keep what they were initialised to, be it 0 or 1, in the mean."""
    if any(name in path for name in _QUERY_AND_KEY_NORMS):  # these set the size of both
        return parameter + (scale - 1) + 0.1 * scale * draw
    spread = 0.1 if "norm" in path or "ln_" in path else 0.3
    return parameter + spread * draw


def _gain(path: str, scale: float) -> float:
    if any(name in path for name in _QUERIES_AND_KEYS):
        return scale
    # What attention brings must matter for the next token.
    return 1.5 if any(name in path for name in _OUTPUTS) else 1.0


def _fan_in(module: nn.Module, parameter: Tensor) -> int:
    """Inputs of a weight: the last axis, but the one before in GPT-2's transposed projections."""
    if type(module).__name__ == "Conv1D":
        return parameter.shape[0]
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return parameter[0].numel()
    return parameter.shape[-1]
