"""A small Llama for training; takes positions per row and returns every layer's states."""

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from kvpolicy.evaluation.tasks.needle.vocabulary import VOCAB_SIZE

MAX_POSITION = 4224
NORM_EPS = 1e-5


@attrs.frozen
class NetworkShape:
    """The sizes of a network; the defaults are the needle model's sizes.

    Args:
        vocab_size: tokens of the vocabulary.
        hidden: width of the hidden states.
        query_heads: query heads of a layer.
        kv_heads: KV heads of a layer, a divisor of ``query_heads``.
        head_dim: dimensions of a head, even.
        intermediate: width of the feed-forward layers.
        num_layers: decoder layers.
        rope_theta: base of the rotary frequencies.
        max_position: positions that the model is trained for.
    """

    vocab_size: int = VOCAB_SIZE
    hidden: int = 128
    query_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 256
    num_layers: int = 6
    rope_theta: float = 1e5
    max_position: int = MAX_POSITION


NEEDLE_SHAPE = NetworkShape()

HOP_LAYER = 1
"""The layer in which a two-hop question finds its bridge; the layer above finds the values."""

Blindfold = tuple[Tensor, Tensor]
"""Two masks ``[batch, length]`` of 0 and 1: tokens of the first do not see those of the second."""


def rotary_tables(positions: Tensor, shape: NetworkShape) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of ``positions``, ``[batch, 1, query_len, head_dim]``."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies = shape.rope_theta**-steps
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply Llama's rotary embedding to ``x [batch, heads, query_len, head_dim]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def causal_attention(
    queries: Tensor, keys: Tensor, values: Tensor, blindfold: Blindfold | None = None
) -> Tensor:
    """Compute causal grouped-query attention, block by block over the queries.

    In bfloat16 on a CPU this takes a fraction of the time of the fused kernel, whose backward pass
    is slow there.

    Args:
        queries: ``[batch, query_heads, query_len, head_dim]``.
        keys: ``[batch, kv_heads, query_len, head_dim]``.
        values: like ``keys``.
        blindfold: which tokens must not see which, besides the causal mask.

    Returns:
        ``[batch, query_heads, query_len, head_dim]``.
    """
    batch, query_heads, length, head_dim = queries.shape
    kv_heads = keys.shape[1]
    block = 64 if length <= 512 else 128
    transposed, outputs = keys.transpose(-1, -2), []
    for start in range(0, length, block):
        stop = min(length, start + block)
        grouped = (queries[:, :, start:stop] * head_dim**-0.5).reshape(
            batch, kv_heads, -1, head_dim
        )
        scores = (grouped @ transposed[..., :stop]).view(batch, query_heads, stop - start, stop)
        mask = torch.full((stop - start, stop), float("-inf"), dtype=scores.dtype).triu(1 + start)
        if blindfold is not None:
            mask = (
                mask
                - 1e4 * blindfold[0][:, None, start:stop, None] * blindfold[1][:, None, None, :stop]
            )
        weights = (
            torch.softmax(scores + mask, dim=-1).to(values.dtype).view(batch, kv_heads, -1, stop)
        )
        outputs.append(
            (weights @ values[:, :, :stop]).view(batch, query_heads, stop - start, head_dim)
        )
    return torch.cat(outputs, dim=2)


class Block(nn.Module):
    """One decoder layer; its output projections start at zero, so it begins as the identity."""

    def __init__(self, shape: NetworkShape = NEEDLE_SHAPE) -> None:
        super().__init__()
        self.shape, hidden = shape, shape.hidden
        self.attention_norm = nn.RMSNorm(hidden, eps=NORM_EPS)
        self.mlp_norm = nn.RMSNorm(hidden, eps=NORM_EPS)
        num_heads = shape.query_heads + 2 * shape.kv_heads
        self.qkv = nn.Linear(hidden, num_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.query_heads * shape.head_dim, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, hidden, bias=False)
        for linear in (self.qkv, self.gate_up):
            nn.init.normal_(linear.weight, std=hidden**-0.5)
        for linear in (self.out, self.down):
            nn.init.zeros_(linear.weight)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, blindfold: Blindfold | None = None
    ) -> Tensor:
        """Compute this layer's output ``[batch, query_len, hidden]``."""
        batch, length, _ = x.shape
        kv_heads, head_dim = self.shape.kv_heads, self.shape.head_dim
        heads = self.qkv(self.attention_norm(x)).view(batch, length, -1, head_dim).transpose(1, 2)
        rotated = rotate(heads[:, :-kv_heads], cos, sin)
        queries, keys = torch.split(rotated, [self.shape.query_heads, kv_heads], dim=1)
        attended = causal_attention(queries, keys, heads[:, -kv_heads:], blindfold)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        update: Tensor = self.down(functional.silu(gate) * up)
        return x + update


class Network(nn.Module):
    """The whole network; large tied embeddings and a small final norm ease learning to copy."""

    def __init__(self, shape: NetworkShape = NEEDLE_SHAPE) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        nn.init.normal_(self.embedding.weight, std=0.3)
        nn.init.constant_(self.norm.weight, 0.1)

    def layers(self) -> list[Block]:
        """Return the decoder layers, lowest first."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def forward(
        self, input_ids: Tensor, positions: Tensor, blindfold: Blindfold | None = None
    ) -> list[Tensor]:
        """Return the hidden states ``[batch, query_len, hidden]`` after each layer.

        Args:
            input_ids: ``[batch, query_len]``.
            positions: rotary positions ``[batch, query_len]``.
            blindfold: applied up to and including ``HOP_LAYER``.
        """
        cos, sin = rotary_tables(positions, self.shape)
        x = self.embedding(input_ids)
        states = []
        for index, block in enumerate(self.layers()):
            x = block(x, cos, sin, blindfold if index <= HOP_LAYER else None)
            states.append(x)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits ``[..., vocabulary]`` from hidden states ``[..., hidden]``."""
        return functional.linear(self.norm(hidden), self.embedding.weight)

    def stack_hop_layer(self) -> None:
        """Copy the weights of layer ``HOP_LAYER`` to the layer above it.

        Embeddings are tied, so the hop layer writes the bridge's embedding into the hidden state.
        The copy can then look up the bridge as the hop layer looked up its own token.
        """
        self.blocks[HOP_LAYER + 1].load_state_dict(self.blocks[HOP_LAYER].state_dict())
