"""The sizes of a model that decide its cost."""

from __future__ import annotations

import attrs

from kvpolicy.checks import check_count


@attrs.frozen
class ModelShape:
    """The sizes of a decoder that its cost depends on.

    Args:
        name: What to call it.
        hidden_size: Width of the residual stream.
        query_heads: Query heads of a layer.
        kv_heads: KV heads of a layer, a divisor of ``query_heads``.
        head_dim: Width of a head, of keys and values alike.
        mlp_weights: For each layer, the weights of its MLP that one token is multiplied with: of
            the experts that are active, where there are experts. As many as there are layers.
        vocab_size: Rows of the output head.
        max_positions: Tokens that the model is made for; None where that is not known.
        windows: For each layer, the tokens that one of its tokens sees, itself among them; None
            where it sees all. Empty where all layers see all.

    Raises:
        TypeError: A size is not an int, or ``mlp_weights`` no tuple.
        ValueError: A size is below 1, ``query_heads`` is no multiple of ``kv_heads``, or there are
            no layers or windows of another number of layers.

    Example:
        >>> shape = ModelShape("tiny", 8, 4, 2, 3, (gated_mlp(8, 10),) * 5, vocab_size=9)
        >>> shape.num_layers, shape.projection_weights, shape.attention_weights
        (5, 192, 288)
    """

    name: str
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    mlp_weights: tuple[int, ...]
    vocab_size: int
    max_positions: int | None = None
    windows: tuple[int | None, ...] = ()

    def __attrs_post_init__(self) -> None:
        for size in ("hidden_size", "query_heads", "kv_heads", "head_dim", "vocab_size"):
            check_count(size, getattr(self, size), minimum=1)
        if self.max_positions is not None:
            check_count("max_positions", self.max_positions, minimum=1)
        for window in self.windows:
            if window is not None:
                check_count("windows", window, minimum=1)
        if not isinstance(self.mlp_weights, tuple):
            raise TypeError(f"mlp_weights must be a tuple of ints, got {self.mlp_weights!r}")
        if not self.mlp_weights:
            raise ValueError("mlp_weights must have an entry for each layer, got none")
        for weights in self.mlp_weights:
            check_count("mlp_weights", weights, minimum=1)
        if self.windows and len(self.windows) != len(self.mlp_weights):
            raise ValueError(
                f"windows must have an entry for each of {len(self.mlp_weights)} layers, or none, "
                f"got {len(self.windows)}"
            )
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"query_heads must be a multiple of kv_heads, got {self.query_heads} and "
                f"{self.kv_heads}"
            )

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.mlp_weights)

    def window_of(self, layer_idx: int) -> int | None:
        """Tokens that one token of a layer sees; None where it sees all."""
        return self.windows[layer_idx] if self.windows else None

    @property
    def eligible(self) -> list[int]:
        """Layers after which tokens may be dropped whatever the context; all if none sees all."""
        seeing = [index for index in range(self.num_layers) if self.window_of(index) is None]
        return seeing or list(range(self.num_layers))

    @property
    def projection_weights(self) -> int:
        """Weights that make a layer's queries, keys and values."""
        return self.hidden_size * self.head_dim * (self.query_heads + 2 * self.kv_heads)

    @property
    def attention_weights(self) -> int:
        """Those, and the weights of the output projection."""
        return self.projection_weights + self.hidden_size * self.head_dim * self.query_heads


def gated_mlp(hidden_size: int, intermediate_size: int) -> int:
    """Weights of an MLP of three matrices: gate, up and down."""
    return 3 * hidden_size * intermediate_size


def plain_mlp(hidden_size: int, intermediate_size: int) -> int:
    """Weights of an MLP of two matrices: up and down."""
    return 2 * hidden_size * intermediate_size


def mixture_mlp(hidden_size: int, width: int, *, active: int, experts: int, shared: int = 0) -> int:
    """Weights of a mixture of gated experts that one token is multiplied with, and the router's.

    Args:
        hidden_size: Width of the residual stream.
        width: Of an expert.
        active: Experts that a token is sent to.
        experts: All of them.
        shared: Width of an expert that all tokens share, which has a gate of its own; 0 for none.
    """
    router = hidden_size * (experts + bool(shared))
    return gated_mlp(hidden_size, active * width + shared) + router
