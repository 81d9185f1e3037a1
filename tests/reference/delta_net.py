"""Computes the gated delta net of Qwen3-Next token by token and head by head.

A causal convolution runs over the last inputs. Each value head has a memory: every token first
decays it, then corrects it at the token's key, then reads it at the token's query.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

# The epsilon with which Transformers (and the kernels it replaces) normalise a vector.
LENGTH_EPS = 1e-6


@dataclass(frozen=True)
class DeltaState:
    """The state that a layer keeps of all tokens read so far.

    Attributes:
        inputs: the convolution's last `kernel - 1` inputs `[channels]`, or fewer if fewer came.
        memories: per value head `[key_dim, value_dim]`; none before the first token.
    """

    inputs: tuple[Tensor, ...] = ()
    memories: tuple[Tensor, ...] = ()


def read_tokens(module: Any, normed: Tensor, state: DeltaState) -> tuple[Tensor, DeltaState]:
    """Reads tokens in order; returns their outputs and the final state."""
    rows = []
    for token in normed:
        row, state = read_token(module, token, state)
        rows.append(row)
    return torch.stack(rows), state


def read_token(module: Any, token: Tensor, state: DeltaState) -> tuple[Tensor, DeltaState]:
    """Reads one token `[hidden]` and returns the net's output `[hidden]` and the new state."""
    queries, keys, values, gates, strengths, steps = project_token(module, token)
    mixed = torch.cat([*queries, *keys, *values])
    window = [*state.inputs, mixed][-module.conv_kernel_size :]
    queries, keys, values = split_heads(module, convolve(module, window))
    memories = state.memories or tuple(
        torch.zeros(module.head_k_dim, module.head_v_dim) for _ in values
    )
    sharing = len(values) // len(keys)  # consecutive value heads read with one key head
    outputs, after = [], []
    for head, (value, memory) in enumerate(zip(values, memories, strict=True)):
        key = unit(keys[head // sharing])
        query = unit(queries[head // sharing]) / module.head_k_dim**0.5
        rate = torch.exp(module.A_log[head]) * softplus(steps[head] + module.dt_bias[head])
        memory = memory * torch.exp(-rate)
        correction = torch.sigmoid(strengths[head]) * (value - key @ memory)
        memory = memory + torch.outer(key, correction)
        outputs.append(gated_norm(module.norm, query @ memory, gates[head]))
        after.append(memory)
    kept = tuple(window[1:] if len(window) == module.conv_kernel_size else window)
    return module.out_proj.weight @ torch.cat(outputs), DeltaState(kept, tuple(after))


def project_token(module: Any, token: Tensor) -> tuple[list[Tensor], ...]:
    """Returns queries and keys per key head, and values, gates, strengths and steps per value head.

    Each key head's block of the projection is its query, its key, its values and their gates.
    """
    sharing = module.num_v_heads // module.num_k_heads
    width = sharing * module.head_v_dim
    queries, keys, values, gates = [], [], [], []
    strengths, steps = [], []
    for block in (module.in_proj_qkvz.weight @ token).chunk(module.num_k_heads):
        query, key, value, gate = block.split([module.head_k_dim, module.head_k_dim, width, width])
        queries.append(query)
        keys.append(key)
        values += value.chunk(sharing)
        gates += gate.chunk(sharing)
    for block in (module.in_proj_ba.weight @ token).chunk(module.num_k_heads):
        strengths += block[:sharing]
        steps += block[sharing:]
    return queries, keys, values, gates, strengths, steps


def convolve(module: Any, window: list[Tensor]) -> Tensor:
    """Returns each channel's causal convolution at the last input; earlier ones may be missing."""
    assert module.activation == "silu", "only this activation is covered"
    assert module.conv1d.bias is None, "no bias here"
    taps = module.conv1d.weight[:, 0]  # [channels, kernel], the last is the newest input's
    total = torch.zeros_like(window[-1])
    for back, row in enumerate(reversed(window)):
        total = total + taps[:, -1 - back] * row
    return silu(total)


def split_heads(module: Any, mixed: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Splits `[channels]` into queries and keys per key head and values per value head."""
    queries, keys, values = mixed.split([module.key_dim, module.key_dim, module.value_dim])
    return (
        list(queries.chunk(module.num_k_heads)),
        list(keys.chunk(module.num_k_heads)),
        list(values.chunk(module.num_v_heads)),
    )


def unit(vector: Tensor) -> Tensor:
    """Returns `vector` divided by its length."""
    return vector / torch.sqrt((vector * vector).sum() + LENGTH_EPS)


def gated_norm(norm: Any, vector: Tensor, gate: Tensor) -> Tensor:
    """Returns one head's output after RMS norm, times the SiLU of the gate."""
    mean_square = (vector * vector).mean()
    normed: Tensor = norm.weight * (vector / torch.sqrt(mean_square + norm.variance_epsilon))
    return normed * silu(gate)
