"""The gated delta net of Qwen3-Next written out: token by token, head by head.

A causal convolution over the last inputs, then a memory per value head that each token first lets
fade, then corrects where its key points, then reads where its query points.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

# As Transformers (and the kernels it stands for) divide by a length.
LENGTH_EPS = 1e-6


@dataclass(frozen=True)
class DeltaState:
    """What a layer holds of all tokens that it has read.

    Attributes:
        inputs: of the convolution `[channels]`, the last `kernel - 1` or as many as there were.
        memories: per value head `[key_dim, value_dim]`; none before the first token.
    """

    inputs: tuple[Tensor, ...] = ()
    memories: tuple[Tensor, ...] = ()


def read_tokens(module: Any, normed: Tensor, state: DeltaState) -> tuple[Tensor, DeltaState]:
    """Reads tokens in their order.

    Args:
        module: the layer's gated delta net, for its weights.
        normed: `[len, hidden]`, what enters it.
        state: after the tokens before; not modified.

    Returns:
        `[len, hidden]`, what leaves it; the state after the last token.
    """
    rows = []
    for token in normed:
        row, state = read_token(module, token, state)
        rows.append(row)
    return torch.stack(rows), state


def read_token(module: Any, token: Tensor, state: DeltaState) -> tuple[Tensor, DeltaState]:
    """Reads one token `[hidden]`: what leaves the net `[hidden]`, and the new state."""
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
    """Queries and keys per key head; values, output gates, strengths and steps per value head.

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
    """The causal convolution of each channel at the window's last input; earlier ones may lack."""
    assert module.activation == "silu", "only this activation is covered"
    assert module.conv1d.bias is None, "no bias here"
    taps = module.conv1d.weight[:, 0]  # [channels, kernel], the last is the newest input's
    total = torch.zeros_like(window[-1])
    for back, row in enumerate(reversed(window)):
        total = total + taps[:, -1 - back] * row
    return silu(total)


def split_heads(module: Any, mixed: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """`[channels]` to queries and keys per key head and values per value head."""
    queries, keys, values = mixed.split([module.key_dim, module.key_dim, module.value_dim])
    return (
        list(queries.chunk(module.num_k_heads)),
        list(keys.chunk(module.num_k_heads)),
        list(values.chunk(module.num_v_heads)),
    )


def unit(vector: Tensor) -> Tensor:
    """`vector` over its length."""
    return vector / torch.sqrt((vector * vector).sum() + LENGTH_EPS)


def gated_norm(norm: Any, vector: Tensor, gate: Tensor) -> Tensor:
    """Root mean square norm of one head's output, times the activated gate."""
    mean_square = (vector * vector).mean()
    normed: Tensor = norm.weight * (vector / torch.sqrt(mean_square + norm.variance_epsilon))
    return normed * silu(gate)
